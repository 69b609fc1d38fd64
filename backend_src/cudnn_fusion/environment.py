"""What makes a plan reusable here.

Two records (see README, "What must match"): `Compatibility` decides whether a blob can be loaded and is
hashed into the store's path; `Provenance` is kept with the entry and marks a plan stale at most. Neither
holds UUIDs, PCI ids, paths or host names.
"""

from __future__ import annotations

import hashlib
import platform
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudnn_fusion import preflight
from cudnn_fusion.records import canonical_json, record_from_json, record_to_json

BLOB_FORMAT = 1
MUST_MATCH = "must match"
MARKS_STALE = "marks stale"


@dataclass(frozen=True)
class Compatibility:
    """What makes a blob loadable. ``kind`` is ``cuda`` or ``cpu``.

    For ``cuda``: ``cudnn`` is the backend version (91900), ``cuda_driver_api`` the driver's API version
    (13000), sizes in bytes, counts as the CUDA driver gives them. For ``cpu``: ``device_name`` is the CPU
    model, ``features`` a hash of its feature flags, ``threads`` torch's thread count, ``torch`` its version.
    Fields that do not apply are None.
    """

    kind: str
    device_name: str
    blob_format: int = BLOB_FORMAT
    cudnn: int | None = None
    cuda_driver_api: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_bus_bits: int | None = None
    shared_memory_per_block_optin: int | None = None
    registers_per_block: int | None = None
    memory_class_gib: int | None = None
    features: str | None = None
    threads: int | None = None
    torch: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary with every field."""
        return typing.cast(dict[str, Any], record_to_json(self))

    @classmethod
    def from_json(cls, data: object) -> Compatibility:
        """Raises records.RecordError when ``data`` is not exactly this record."""
        return record_from_json(cls, data)

    def hash(self) -> str:
        """The name of this environment's directory: 16 hex digits of sha256 over the canonical JSON."""
        return _short_hash(canonical_json(self.to_json()))

    def label(self) -> str:
        """Short text for tables and logs."""
        if self.kind == "cuda":
            return f"{self.device_name}, cuDNN {self.cudnn}, CUDA driver API {self.cuda_driver_api}"
        return f"{self.device_name}, torch {self.torch}, {self.threads} threads"


@dataclass(frozen=True)
class Provenance:
    """Where a plan was made; a difference marks it stale at most."""

    product: str
    torch: str
    driver: str | None = None
    frontend: str | None = None
    cuda_runtime: str | None = None
    host: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary with every field."""
        return typing.cast(dict[str, Any], record_to_json(self))

    @classmethod
    def from_json(cls, data: object) -> Provenance:
        """Raises records.RecordError when ``data`` is not exactly this record."""
        return record_from_json(cls, data)

    def hash(self) -> str:
        """16 hex digits of sha256 over the canonical JSON."""
        return _short_hash(canonical_json(self.to_json()))


@dataclass(frozen=True)
class FieldRule:
    """What a difference in one field means (`MUST_MATCH` or `MARKS_STALE`), and why."""

    record: str
    field: str
    meaning: str
    why: str


FIELD_RULES: tuple[FieldRule, ...] = tuple(
    FieldRule(record.__name__, field, meaning, why)
    for record, meaning, rows in (
        (
            Compatibility,
            MUST_MATCH,
            {
                "kind": "GPU and CPU plans are different things",
                "device_name": "cuDNN does not check it, and the fastest plan differs between models",
                "blob_format": "how this product writes blobs",
                "cudnn": "cuDNN refuses a blob of any other version",
                "cuda_driver_api": "cuDNN refuses a blob made under another driver API version",
                "compute_capability": "a blob holds machine code",
                "multiprocessors": "cuDNN refuses a blob planned for another count",
                "memory_bus_bits": "cuDNN refuses a blob planned for another width",
                "shared_memory_per_block_optin": "cuDNN refuses a blob planned for another limit",
                "registers_per_block": "cuDNN refuses a blob planned for another limit",
                "memory_class_gib": "variants of one GPU differ in memory, and with it in the fastest plan",
                "features": "decides which CPU kernels exist",
                "threads": "the fastest CPU plan depends on it",
                "torch": "on the CPU torch's kernels are the plan",
            },
        ),
        (
            Provenance,
            MARKS_STALE,
            {
                "product": "newer code may offer better candidates",
                "torch": "the time to compare with came from its kernels",
                "driver": "a release may change clocks and launch costs",
                "frontend": "newer code may offer better candidates",
                "cuda_runtime": "the time to compare with came from its kernels",
                "host": "host costs are part of what was timed",
            },
        ),
    )
    for field, why in rows.items()
)
"""Every field of both records, once."""


@dataclass(frozen=True)
class Difference:
    """One field that differs: as ``stored``, as it is ``here``, and what that means (see `FIELD_RULES`)."""

    field: str
    stored: str | int | None
    here: str | int | None
    meaning: str

    def __str__(self) -> str:
        return f"{self.field}: stored {self.stored}, here {self.here}"


def compare(stored: Compatibility | Provenance, here: Compatibility | Provenance) -> list[Difference]:
    """The fields in which two records of one kind differ, in the order of `FIELD_RULES`.

    Raises TypeError when the records are of different kinds.
    """
    if type(stored) is not type(here):
        raise TypeError(f"cannot compare {type(stored).__name__} with {type(here).__name__}")
    rules = [rule for rule in FIELD_RULES if rule.record == type(stored).__name__]
    pairs = [(rule, getattr(stored, rule.field), getattr(here, rule.field)) for rule in rules]
    return [Difference(rule.field, old, new, rule.meaning) for rule, old, new in pairs if old != new]


def cpu_compatibility() -> Compatibility:
    """This machine's CPU environment, with the thread count that torch has now."""
    import torch

    model, features = _read_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    return Compatibility(
        kind="cpu",
        device_name=model,
        features=features,
        threads=torch.get_num_threads(),
        torch=_public_version(torch.__version__),
    )


def cuda_compatibility(device: int) -> Compatibility:
    """The environment of CUDA device ``device`` (in the numbering that CUDA_VISIBLE_DEVICES leaves).

    Raises preflight.GpuUnavailableError without such a device, preflight.CudnnLoadError without cuDNN.
    """
    return _of_device(preflight.read_device(device), preflight.cudnn_version())


def target_compatibility(description: Mapping[str, Any], cudnn_version: int) -> Compatibility:
    """The environment that `cuda_compatibility` gives on the described device with that cuDNN (91900).

    ``description`` is one of `cudnn_fusion.devices`. Raises devices' DeviceDescriptionError when a property
    is missing or no number.
    """
    from cudnn_fusion.devices import DeviceDescriptionError

    try:
        properties = description["properties"]
        version = int(properties["deviceVer"])
        facts = preflight.DeviceFacts(
            name=str(properties["deviceName"]),
            compute_capability=(version // 100, version % 100 // 10),
            multiprocessors=int(properties["multiProcessorCount"]),
            memory_bus_bits=int(description["memory_bus_bits"]),
            shared_memory_per_block_optin_bytes=int(properties["maxSharedMemoryPerBlockOptin"]),
            registers_per_block=int(properties["regsPerBlock"]),
            total_memory_bytes=int(properties["totalGlobalMem"]),
            driver_api=int(properties["driverVer"]),
        )
    except KeyError as problem:
        raise DeviceDescriptionError(f"the device description lacks {problem}; add it") from problem
    except (TypeError, ValueError) as problem:
        raise DeviceDescriptionError(f"the device description holds a wrong value: {problem}") from problem
    return _of_device(facts, cudnn_version)


def current_provenance(kind: str) -> Provenance:
    """Where plans made now come from. For ``kind`` ``cpu`` what only concerns GPUs is left None."""
    import torch

    from cudnn_fusion import __version__

    gpu = kind == "cuda"
    return Provenance(
        product=__version__,
        torch=_public_version(torch.__version__),
        driver=preflight.driver_release() if gpu else None,
        frontend=preflight.frontend_version() if gpu else None,
        cuda_runtime=torch.version.cuda if gpu else None,
        host=" ".join(part for part in (platform.machine(), *platform.libc_ver()) if part),
    )


def _of_device(device: preflight.DeviceFacts, cudnn: int) -> Compatibility:
    major, minor = device.compute_capability
    return Compatibility(
        kind="cuda",
        device_name=device.name,
        cudnn=cudnn,
        cuda_driver_api=device.driver_api,
        compute_capability=f"{major}.{minor}",
        multiprocessors=device.multiprocessors,
        memory_bus_bits=device.memory_bus_bits,
        shared_memory_per_block_optin=device.shared_memory_per_block_optin_bytes,
        registers_per_block=device.registers_per_block,
        memory_class_gib=_memory_class_gib(device.total_memory_bytes),
    )


def _memory_class_gib(total_bytes: int) -> int:
    """Rounded to 8 GiB, at least 8: what a driver keeps for itself differs, a product variant's size more."""
    return max(8, round(total_bytes / 2**30 / 8) * 8)


def _read_cpuinfo(text: str) -> tuple[str, str]:
    """The first CPU's model name and a hash of its feature flags, independent of their order."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            values.setdefault(name.strip().lower(), value.strip())
    model = values.get("model name") or platform.processor() or platform.machine()
    flags = values.get("flags") or values.get("features") or ""
    return model, _short_hash(" ".join(sorted(set(flags.split()))))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _public_version(version: str) -> str:
    """Without the local part (``+cpu``): the CUDA runtime is a field of its own."""
    return str(version).split("+", maxsplit=1)[0]

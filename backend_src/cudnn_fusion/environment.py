"""What makes a plan reusable here.

Two records (see README, "What must match"): `Compatibility` decides whether a blob can be loaded and is
hashed into the store's path; `Provenance` is kept with the entry and marks a plan stale at most.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    blob_format: int = 1
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


@dataclass(frozen=True)
class Provenance:
    """Where a plan was made; a difference marks it stale at most."""

    product: str
    torch: str
    driver: str | None = None
    frontend: str | None = None
    cuda_runtime: str | None = None
    host: str | None = None

"""What is persisted of a tuned segment: its key, and the plan that won.

These records know nothing of files; `cudnn_fusion.plan_store` writes and reads them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from cudnn_fusion.records import FORMAT_VERSION, RecordError, canonical_json, record_from_json, record_to_json
from cudnn_fusion.shapes import Bucket

__all__ = [
    "FORMAT_VERSION",
    "BucketRecord",
    "Candidate",
    "Errors",
    "Plan",
    "PlanFormatError",
    "PlanKey",
    "SampledOutputs",
    "canonical_json",
    "moment",
    "now_text",
    "sha256_hex",
]

ENGINES = ("cudnn", "depthwise", "inductor", "stem", "torch")
CHECKED_ON = ("samples", "generated", "none")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_Record = TypeVar("_Record")


class PlanFormatError(ValueError):
    """A record is not what it should be: says which field, what was found and what was expected."""


def sha256_hex(data: bytes) -> str:
    """sha256 in hex: a blob's name, and a plan's `blob_sha256`."""
    return hashlib.sha256(data).hexdigest()


def now_text() -> str:
    """The present time as records hold it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def moment(made_at: str) -> datetime:
    """When a record was made; the beginning of time for an empty text. Raises PlanFormatError."""
    if not made_at:
        return datetime.min.replace(tzinfo=UTC)
    try:
        when = datetime.fromisoformat(made_at)
    except ValueError as problem:
        raise PlanFormatError(
            f"made_at is {made_at[:60]!a}, expected an ISO 8601 time or nothing"
        ) from problem
    return when if when.tzinfo else when.replace(tzinfo=UTC)


@dataclass(frozen=True)
class PlanKey:
    """Everything that must be equal for a plan to be used: verified in full on every read.

    ``signature`` is `Segment.signature()`: operations, attributes, dtypes and layouts of every operand.
    ``sizes`` gives the dimensions and the canonical strides (in elements) of every operand.
    ``validation`` names the settings that the plan was checked with: a plan made with other settings is
    not reused as checked.
    """

    signature: str
    sizes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    precision: str
    validation: str

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return _as_dictionary(self)

    @classmethod
    def from_json(cls, data: object) -> PlanKey:
        """Raises PlanFormatError when ``data`` is not exactly a key."""
        key = _record(cls, data)
        _check_key(key)
        return key

    def digest(self) -> str:
        """sha256 over the canonical JSON, in hex: the entry's file name."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """One way to run a segment, as an engine names it.

    ``engine`` is one of `ENGINES`. ``form`` says which part of the segment one cuDNN graph covers or
    which torch lowering is meant (``fused``, ``conv_bias_relu+torch``, ``channels_last``). For cuDNN:
    ``engine_id`` and ``knobs`` (knob type to value) where the plan can be replayed from them, and
    ``plan_name`` as the library names it. A plan's index is not part of it: the list is made anew by every
    version and GPU.
    """

    engine: str
    form: str
    plan_name: str = ""
    engine_id: int | None = None
    knobs: tuple[tuple[str, int], ...] = ()
    replayable: bool = True

    def label(self) -> str:
        """Short text for tables and logs."""
        return f"{self.engine}:{self.form}" + (f":{self.plan_name}" if self.plan_name else "")


@dataclass(frozen=True)
class Errors:
    """Relative error against the float64 reference: ``largest`` is max|y-r| / max|r|, ``rms`` is
    ||y-r|| / ||r||."""

    largest: float
    rms: float


@dataclass(frozen=True)
class SampledOutputs:
    """Reference outputs at sampled positions for operands generated from ``seed``.

    ``positions`` index the output's logical (row-major) order and are themselves derived from the seed;
    ``values`` are float64 results rounded to float32.
    """

    seed: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """The winner for one key in one environment.

    ``time_us`` is the median and ``spread_us`` the interquartile range of the timed runs; both are None for a
    plan that was made without the device (``timed`` False). ``torch_time_us`` and ``torch_error`` are the
    unfused torch form's, measured in the same run. ``rejected`` holds pairs of candidate label and reason.
    ``checked_on`` is ``samples``, ``generated`` or ``none``. ``provenance`` is
    `cudnn_fusion.environment.Provenance` as a dictionary.
    """

    key: PlanKey
    candidate: Candidate
    workspace_bytes: int
    timed: bool
    time_us: float | None
    spread_us: float | None
    torch_time_us: float | None
    error: Errors | None
    torch_error: Errors | None
    checked_on: str
    sampled: SampledOutputs | None
    candidates_timed: int
    rejected: tuple[tuple[str, str], ...] = ()
    behavior_notes: tuple[str, ...] = ()
    selected_engine: str = ""
    blob_sha256: str | None = None
    made_at: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary with every field."""
        return _as_dictionary(self)

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Raises PlanFormatError when ``data`` is not exactly a plan whose fields agree with each other."""
        plan = _record(cls, data)
        _check_key(plan.key)
        _check_plan(plan)
        return plan

    def is_better_than(self, other: Plan) -> bool:
        """Whether this plan should replace ``other``: a timed one replaces an untimed one and never the
        other way round, else the newer one wins."""
        return (self.timed, moment(self.made_at)) > (other.timed, moment(other.made_at))


@dataclass(frozen=True)
class BucketRecord:
    """One tuned bucket of one program: ``entries`` are its segments' `PlanKey.digest()`, in order.

    ``sizes`` are pairs of axis name and size, as in `shapes.Bucket`. ``model_time_us`` is the median time of
    the whole program run from these plans, ``torch_time_us`` of torch alone; ``error`` and ``torch_error``
    are theirs against float64; None where not measured. ``swapped`` counts segments whose plan the whole
    program chose against its time alone.
    """

    sizes: tuple[tuple[str, int], ...]
    program_sha256: str
    entries: tuple[str, ...]
    model_time_us: float | None = None
    torch_time_us: float | None = None
    error: Errors | None = None
    torch_error: Errors | None = None
    swapped: int = 0
    made_at: str = ""

    @property
    def bucket(self) -> Bucket:
        """The bucket with these sizes."""
        return Bucket.of(dict(self.sizes))

    def is_better_than(self, other: BucketRecord) -> bool:
        """Whether this record should replace ``other``, by the rule of `Plan.is_better_than`."""
        timed, other_timed = self.model_time_us is not None, other.model_time_us is not None
        return (timed, moment(self.made_at)) > (other_timed, moment(other.made_at))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary with every field."""
        return _as_dictionary(self)

    @classmethod
    def from_json(cls, data: object) -> BucketRecord:
        """Raises PlanFormatError when ``data`` is not exactly such a record."""
        record = _record(cls, data)
        axes = [axis for axis, _ in record.sizes]
        _require(axes == sorted(set(axes)), "sizes", axes, "every axis once, sorted by name")
        for axis, size in record.sizes:
            _require(re.fullmatch(r"\w+", axis) is not None, "sizes", axis, "names of axes")
            _require(size >= 0, f"the size of {axis}", size, "0 or more")
        for digest in (record.program_sha256, *record.entries):
            _require(_SHA256.fullmatch(digest) is not None, "a digest", digest, "64 hex digits")
        _require_not_negative(record, "model_time_us", "torch_time_us", "swapped")
        moment(record.made_at)
        return record


def _as_dictionary(record: object) -> dict[str, Any]:
    return dict(record_to_json(record))


def _record(kind: type[_Record], data: object) -> _Record:
    try:
        return record_from_json(kind, data)
    except RecordError as problem:
        raise PlanFormatError(str(problem)) from problem


def _check_key(key: PlanKey) -> None:
    for name, dims, strides in key.sizes:
        _require(
            len(dims) == len(strides), f"sizes of {name}", (dims, strides), "a stride for each dimension"
        )
        _require(all(size >= 0 for size in dims), f"sizes of {name}", dims, "sizes of 0 or more")


def _check_plan(plan: Plan) -> None:
    _require(
        plan.candidate.engine in ENGINES, "engine", plan.candidate.engine, f"one of {', '.join(ENGINES)}"
    )
    _require(plan.checked_on in CHECKED_ON, "checked_on", plan.checked_on, f"one of {', '.join(CHECKED_ON)}")
    _require(plan.timed == (plan.time_us is not None), "time_us", plan.time_us, "a time if and only if timed")
    _require_not_negative(
        plan, "workspace_bytes", "time_us", "spread_us", "torch_time_us", "candidates_timed"
    )
    for error in (plan.error, plan.torch_error):
        if error is not None:
            _require_not_negative(error, "largest", "rms")
    if plan.blob_sha256 is not None:
        _require(
            _SHA256.fullmatch(plan.blob_sha256) is not None, "blob_sha256", plan.blob_sha256, "64 hex digits"
        )
    moment(plan.made_at)


def _require_not_negative(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _require(value is None or value >= 0, name, value, "0 or more")


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise PlanFormatError(f"{name} is {ascii(value)[:60]}, expected {expected}")

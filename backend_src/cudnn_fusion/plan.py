"""What is persisted of a tuned segment: its key, and the plan that won.

These records know nothing of files; `cudnn_fusion.plan_store` writes and reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = 1


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


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
        return {
            "signature": self.signature,
            "sizes": [[name, list(dims), list(strides)] for name, dims, strides in self.sizes],
            "precision": self.precision,
            "validation": self.validation,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanKey:
        """Raises KeyError, TypeError or ValueError when ``data`` is not a key."""
        return cls(
            str(data["signature"]),
            tuple(
                (str(n), tuple(int(v) for v in d), tuple(int(v) for v in s)) for n, d, s in data["sizes"]
            ),
            str(data["precision"]),
            str(data["validation"]),
        )

    def digest(self) -> str:
        """sha256 over the canonical JSON, in hex: the entry's file name."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """One way to run a segment, as an engine names it.

    ``engine`` is ``cudnn`` or ``torch``. ``form`` says which part of the segment one cuDNN graph covers or
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

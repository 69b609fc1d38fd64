"""What an engine is: a library that can run segments."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import Dims, Segment, spanned

Sizes = Mapping[str, Dims]
Operands = Mapping[str, torch.Tensor]


class CandidateRejectedError(Exception):
    """A candidate cannot be built or a plan cannot be loaded; the message is the reason, one line."""


FAILURES = (CandidateRejectedError, RuntimeError, ValueError, TypeError)
"""What building, loading or running a candidate raises when it does not work."""


def reason_of(failure: Exception, what: str) -> str:
    """Why a candidate is rejected, one line; ``what`` it does wrong where the failure does not say so."""
    return str(failure) if isinstance(failure, CandidateRejectedError) else f"{what}: {one_line(failure)}"


def one_line(error: BaseException) -> str:
    """An error's text on one line, cut to what a table or a log can hold."""
    return " ".join(str(error).split())[:300]


@dataclass(frozen=True)
class BuiltPlan:
    """A candidate made into a plan. ``candidate`` may say more than the one that was asked for.

    ``blob`` is the serialized plan, or None for an engine that needs none.
    """

    candidate: Candidate
    blob: bytes | None
    workspace_bytes: int
    behavior_notes: tuple[str, ...] = ()
    selected_engine: str = ""


class ReadyPlan(Protocol):
    """A plan loaded on this device."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that ``run`` needs as workspace."""
        ...

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes ``y`` from packed operands on the current stream, into ``out`` if it is given.

        ``workspace`` holds at least ``workspace_bytes`` bytes (dtype uint8, 16-byte aligned).
        """
        ...


@runtime_checkable
class Preparing(Protocol):
    """A ready plan that reads weights otherwise than packed. It runs faster on operands that `prepare` has
    made once; packed ones it prepares anew in every run.

    What it adds to weights are zeros: a NaN may reach outputs of its row that do not depend on it.
    """

    @property
    def preparation(self) -> Hashable:
        """Equal for plans that make the same of the same weights."""
        ...

    def prepare(self, operands: Operands) -> dict[str, torch.Tensor]:
        """The operands with those that are weights as the plan reads them."""
        ...


@runtime_checkable
class Searching(Protocol):
    """An engine that has more candidates than it lists: near its fastest there may be a faster one."""

    def neighbours(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> list[Candidate]:
        """Candidates that differ in little from one of its own. Empty where all are listed."""
        ...


ALIGNMENT_BYTES = 16
"""What kernels assume of every buffer that they load several elements of at once; none checks it."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of the same strides where it starts between two multiples of `ALIGNMENT_BYTES`.

    What lies between and behind the elements of the copy is zero, as padded layouts need it.
    """
    if tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    copy = tensor.new_zeros(-(-spanned(tensor) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class Engine(Protocol):
    """Builds and loads plans for segments at given sizes."""

    @property
    def name(self) -> str:
        """One of `cudnn_fusion.plan.ENGINES`."""
        ...

    def candidates(self, segment: Segment, sizes: Sizes) -> list[Candidate]:
        """Every way to run the segment, the engine's own preference first. Empty if it supports none."""
        ...

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Plans and compiles. Raises CandidateRejectedError."""
        ...

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> ReadyPlan:
        """Makes a built plan ready on this device. Raises CandidateRejectedError."""
        ...

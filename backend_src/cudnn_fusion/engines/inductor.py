"""Regions as kernels of torch's compiler, kept as machine code.

Inductor compiles a region at fixed sizes; its kernels are recorded (`cudnn_fusion.engines.gpu_kernels`) and
are all that a plan holds. Serving needs no compiler.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence

import torch

from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Sizes, one_line
from cudnn_fusion.engines.gpu_kernels import NotPortableError, record
from cudnn_fusion.engines.kernels_plan import KernelsPlan, load_kernels
from cudnn_fusion.plan import Candidate
from cudnn_fusion.regions import Region, region_module
from cudnn_fusion.segment import CHANNELS_LAST, OUTPUT, Segment, empty, is_packed

FORM = "kernels"


class InductorEngine:
    """Compiles regions for CUDA device ``device``."""

    name = "inductor"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def candidates(self, segment: Segment, sizes: Sizes, only: str | None = None) -> list[Candidate]:
        """One for a region, where a compiler is at hand; if it is of the form ``only``."""
        served = isinstance(segment, Region) and only in (None, FORM) and can_compile()
        return [Candidate(self.name, FORM)] if served else []

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Compiles for these sizes and records the kernels. Raises CandidateRejectedError."""
        assert isinstance(segment, Region)
        inputs = [_operand(segment, sizes, o.name, self.device) for o in segment.inputs]
        layout = segment.operand(OUTPUT).layout
        try:
            run = _compiled(segment, inputs, layout)
            kernels, result = record(run, inputs, self.device)
        except NotPortableError as error:
            raise CandidateRejectedError(f"cannot be kept: {error}") from error
        except Exception as error:  # whatever the compiler raises
            raise CandidateRejectedError(f"torch's compiler failed: {one_line(error)}") from error
        if not is_packed(result, layout) or tuple(result.shape) != tuple(sizes[OUTPUT]):
            raise CandidateRejectedError(f"gives strides {result.stride()}, not {layout}")
        return BuiltPlan(candidate, kernels.to_bytes(), kernels.scratch_bytes)

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> KernelsPlan:
        """Loads the machine code. Raises CandidateRejectedError."""
        return load_kernels(segment, sizes, blob)


def can_compile() -> bool:
    """Whether torch's compiler can work here: it needs Triton, and a C compiler for its launchers."""
    return importlib.util.find_spec("triton") is not None and any(
        shutil.which(name) for name in ("cc", "gcc", "clang")
    )


def _operand(segment: Segment, sizes: Sizes, name: str, device: torch.device) -> torch.Tensor:
    operand = segment.operand(name)
    return empty(tuple(sizes[name]), operand.layout, getattr(torch, operand.dtype), device).fill_(0.5)


def _compiled(region: Region, inputs: Sequence[torch.Tensor], layout: str) -> Callable[[], torch.Tensor]:
    """The region compiled for these inputs, after it has run twice; its result lies as ``layout`` says."""
    module: torch.nn.Module = region_module(region)
    result = module(*inputs)
    if not is_packed(result, layout):
        module = _Relaid(module, _memory_format(result.dim(), layout))
    torch._dynamo.reset()
    with _settings():
        function = torch.compile(module, dynamic=False, fullgraph=True)
        with torch.no_grad():
            for _ in range(2):
                function(*inputs)
    torch.cuda.synchronize(inputs[0].device)

    def run() -> torch.Tensor:
        with torch.no_grad():
            value: torch.Tensor = function(*inputs)
            return value

    return run


def _memory_format(rank: int, layout: str) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats[rank] if layout == CHANNELS_LAST else torch.contiguous_format


class _Relaid(torch.nn.Module):
    """A module whose result is laid as asked for, in the same kernel."""

    def __init__(self, module: torch.nn.Module, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.module = module
        self.memory_format = memory_format

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.module(*inputs)
        return value.contiguous(memory_format=self.memory_format)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Inductor's settings under which its kernels can be found: loaded by Triton, in this process."""
    from torch._inductor import config

    with config.patch({"use_static_cuda_launcher": False, "compile_threads": 1}):
        yield

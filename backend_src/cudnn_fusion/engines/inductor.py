"""Regions, and depthwise convolutions, as kernels of torch's compiler, kept as machine code.

Inductor compiles a segment at fixed sizes; its kernels are recorded (`cudnn_fusion.engines.gpu_kernels`) and
are all that a plan holds. Serving needs no compiler.

It has no kernel of its own for convolutions. One with a channel in and out for each group is written as the
sum that it is: for each position of the kernel, the image shifted by it times a weight a channel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Operands, Sizes, one_line
from cudnn_fusion.engines.gpu_kernels import Kernels, LoadedKernels, NotPortableError, record
from cudnn_fusion.evaluate import evaluate, padded
from cudnn_fusion.plan import Candidate
from cudnn_fusion.regions import Region, region_module
from cudnn_fusion.segment import CHANNELS_LAST, OUTPUT, TRANSPOSED, Operation, Segment, empty, is_packed

FORM = "kernels"
SHIFTED_FORM = "shifted"
MAX_TAPS = 64
"""Positions of the kernel: each is a read in every element's expression."""
_IN_ONE_KERNEL = {
    "realize_reads_threshold": 4 * MAX_TAPS,
    "realize_acc_reads_threshold": 4 * MAX_TAPS,
    "realize_opcount_threshold": 64 * MAX_TAPS,
}
"""Inductor's settings under which a long sum is one expression, not a chain of values in memory."""


class InductorEngine:
    """Compiles regions and depthwise convolutions for CUDA device ``device``."""

    name = "inductor"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def candidates(self, segment: Segment, sizes: Sizes, only: str | None = None) -> list[Candidate]:
        """One for a region or a depthwise convolution, where a compiler is at hand; if it is of the form
        ``only``."""
        form = FORM if isinstance(segment, Region) else SHIFTED_FORM
        if only not in (None, form) or not can_compile():
            return []
        served = form == FORM or is_depthwise(segment, sizes)
        return [Candidate(self.name, form)] if served else []

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Compiles for these sizes and records the kernels. Raises CandidateRejectedError."""
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
        if blob is None:
            raise CandidateRejectedError("a plan of kernels without its blob")
        try:
            kernels = Kernels.from_bytes(blob)
            loaded = LoadedKernels(kernels)
        except (ValueError, RuntimeError) as error:
            raise CandidateRejectedError(f"not loaded: {one_line(error)}") from error
        output = segment.operand(OUTPUT)
        return KernelsPlan(
            loaded,
            tuple(o.name for o in segment.inputs),
            tuple(sizes[OUTPUT]),
            output.layout,
            getattr(torch, output.dtype),
            kernels.scratch_bytes,
        )


@dataclass(frozen=True)
class KernelsPlan:
    """Recorded kernels with the region's buffers."""

    kernels: LoadedKernels
    names: tuple[str, ...]
    out_dims: tuple[int, ...]
    out_layout: str
    out_dtype: torch.dtype
    workspace_bytes: int

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ReadyPlan.run`."""
        buffers = [operands[name] for name in self.names]
        device = buffers[0].device
        if out is None:
            out = empty(self.out_dims, self.out_layout, self.out_dtype, device)
        addresses = [*(buffer.data_ptr() for buffer in buffers), out.data_ptr()]
        addresses.append(0 if workspace is None else workspace.data_ptr())
        self.kernels.run(addresses, torch.cuda.current_stream(device).cuda_stream)
        return out


def can_compile() -> bool:
    """Whether torch's compiler can work here: it needs Triton, and a C compiler for its launchers."""
    return importlib.util.find_spec("triton") is not None and any(
        shutil.which(name) for name in ("cc", "gcc", "clang")
    )


def _operand(segment: Segment, sizes: Sizes, name: str, device: torch.device) -> torch.Tensor:
    operand = segment.operand(name)
    return empty(tuple(sizes[name]), operand.layout, getattr(torch, operand.dtype), device).fill_(0.5)


def is_depthwise(segment: Segment, sizes: Sizes) -> bool:
    """Whether it starts with a convolution of one channel in and one out for each group, and few taps."""
    if not segment.operations or segment.operations[0].kind in TRANSPOSED:
        return False
    groups, w = segment.operations[0].attribute("groups"), sizes["w"]
    return groups > 1 and groups == w[0] == sizes["x"][1] and math.prod(w[2:]) <= MAX_TAPS


def shifted(segment: Segment, operands: Operands) -> torch.Tensor:
    """``y`` of a depthwise convolution and its tail, computed in float32, as a sum of shifted images."""
    wide = {name: operand.float() for name, operand in operands.items()}
    result = evaluate(segment.operations, wide, _sum_of_shifted)
    return result.to(getattr(torch, segment.operand(OUTPUT).dtype))


def _sum_of_shifted(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation
) -> torch.Tensor:
    image = padded(x, operation)
    steps = tuple(zip(operation.attribute("stride"), operation.attribute("dilation"), strict=True))
    counts = [
        (size - dilation * (taps - 1) - 1) // stride + 1
        for size, taps, (stride, dilation) in zip(image.shape[2:], w.shape[2:], steps, strict=True)
    ]
    result = bias
    for number, position in enumerate(itertools.product(*(range(taps) for taps in w.shape[2:]))):
        window = tuple(
            slice(at * dilation, at * dilation + (count - 1) * stride + 1, stride)
            for at, count, (stride, dilation) in zip(position, counts, steps, strict=True)
        )
        weight = w.flatten(2)[:, 0, number].view(1, -1, *(1,) * len(position))
        term = image[(slice(None), slice(None), *window)] * weight
        result = term if result is None else result + term
    assert result is not None
    return result


def _module(segment: Segment, inputs: Sequence[torch.Tensor]) -> torch.nn.Module:
    """The segment for torch's compiler; takes the operands in the order of ``segment.inputs``."""
    if isinstance(segment, Region):
        return region_module(segment)
    names = [operand.name for operand in segment.inputs]
    return make_fx(lambda *values: shifted(segment, dict(zip(names, values, strict=True))))(*inputs)


def _compiled(segment: Segment, inputs: Sequence[torch.Tensor], layout: str) -> Callable[[], torch.Tensor]:
    """The segment compiled for these inputs, after it has run twice; its result lies as ``layout`` says."""
    module = _module(segment, inputs)
    result = module(*inputs)
    if not is_packed(result, layout):
        module = _Relaid(module, _memory_format(result.dim(), layout))
    torch._dynamo.reset()
    with _settings({} if isinstance(segment, Region) else _IN_ONE_KERNEL):
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
def _settings(more: Mapping[str, int]) -> Iterator[None]:
    """Inductor's settings under which its kernels can be found: loaded by Triton, in this process."""
    from torch._inductor import config

    with config.patch({"use_static_cuda_launcher": False, "compile_threads": 1, **more}):
        yield

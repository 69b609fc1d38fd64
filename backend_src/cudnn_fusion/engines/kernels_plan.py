"""A plan that is recorded GPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cudnn_fusion.engines.base import CandidateRejectedError, Operands, Sizes, aligned, one_line
from cudnn_fusion.engines.gpu_kernels import Kernels, LoadedKernels
from cudnn_fusion.segment import OUTPUT, Segment, empty


@dataclass(frozen=True)
class KernelsPlan:
    """Recorded kernels with a segment's buffers."""

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
        buffers = [aligned(operands[name]) for name in self.names]
        device = buffers[0].device
        if out is None:
            out = empty(self.out_dims, self.out_layout, self.out_dtype, device)
        addresses = [*(buffer.data_ptr() for buffer in buffers), out.data_ptr()]
        addresses.append(0 if workspace is None else workspace.data_ptr())
        self.kernels.run(addresses, torch.cuda.current_stream(device).cuda_stream)
        return out


def load_kernels(segment: Segment, sizes: Sizes, blob: bytes | None) -> KernelsPlan:
    """Loads a plan's machine code on the current device. Raises CandidateRejectedError."""
    if blob is None:
        raise CandidateRejectedError("a plan of kernels without its blob")
    try:
        kernels = Kernels.from_bytes(blob)
        known = len(segment.inputs) + 2  # the output and the intermediate values follow the inputs
        if any((a.buffer or 0) >= known for launch in kernels.launches for a in launch.arguments):
            raise ValueError(f"a kernel reads a buffer beyond the {known} that there are")
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

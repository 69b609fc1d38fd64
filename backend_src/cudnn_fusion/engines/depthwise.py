"""Depthwise convolutions with what follows them in one kernel, compiled for a plan's sizes.

cuDNN's and torch's kernels for them are far from what the memory allows in half precision, and torch's
compiler has none of its own. The source is ``depthwise.cu``; NVRTC compiles it in tenths of a second, without
a compiler on the machine, and a plan holds the machine code. Serving needs neither.

Source of facts: PTX ISA (cvt).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Operands, Sizes
from cudnn_fusion.engines.cuda_source import TYPES, compiled, epilogue, parameters, with_macros
from cudnn_fusion.engines.gpu_kernels import Argument, Kernels, Launch
from cudnn_fusion.engines.kernels_plan import KernelsPlan, load_kernels
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import CHANNELS_LAST, OUTPUT, TRANSPOSED, Operation, Segment

FORM = "direct"
Tile = tuple[int, int, int]
"""What a thread computes: rows and columns of the output, and channels, which divide the segment's."""
TILES: tuple[Tile, ...] = (
    (1, 1, 2),
    (1, 4, 2),
    (1, 8, 2),
    (1, 14, 2),
    (2, 4, 2),
    (2, 8, 2),
    (2, 14, 2),
    (2, 7, 1),
    (4, 14, 1),
    (7, 7, 1),
)
"""Small ones keep the GPU busy where there is little to do, large ones share what they read; images often
have multiples of 7 columns."""
MAX_TAPS = 64
"""Positions of the kernel: each is written out in the code."""
MAX_SPAN = 128
"""Rows or columns of the input that a thread may reach: the compiler's time grows with their square."""

_BLOCK = 128


class DepthwiseEngine:
    """Compiles depthwise convolutions for CUDA device ``device``."""

    name = "depthwise"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def candidates(self, segment: Segment, sizes: Sizes, only: str | None = None) -> list[Candidate]:
        """One for each of `TILES`, for what `is_served` names; if they are of the form ``only``."""
        if only not in (None, FORM) or not is_served(segment, sizes):
            return []
        fitting = tiles(segment.operations[0], sizes)
        return [Candidate(self.name, FORM, "x".join(map(str, tile))) for tile in fitting]

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Compiles for these sizes. Raises CandidateRejectedError."""
        p, q, vector = map(int, candidate.plan_name.split("x"))
        tile = p, q, vector
        code = compiled(
            "depthwise.cu", source(segment, sizes, tile), torch.cuda.get_device_capability(self.device)
        )
        return BuiltPlan(candidate, Kernels((_launch(segment, sizes, tile),), (code,), 0).to_bytes(), 0)

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> DepthwisePlan:
        """Loads the machine code. Raises CandidateRejectedError."""
        if not is_served(segment, sizes):
            raise CandidateRejectedError("a plan of a depthwise convolution for what is none")
        kernel = load_kernels(segment, sizes, blob)
        if kernel.workspace_bytes:
            raise CandidateRejectedError("a plan of a depthwise convolution that needs a workspace")
        return DepthwisePlan(kernel, tuple(sizes["w"]))


@dataclass(frozen=True)
class DepthwisePlan:
    """The kernel with the segment's buffers. It reads weights with the channels last, [R*S, C], float32."""

    kernel: KernelsPlan
    weight_dims: tuple[int, ...]
    workspace_bytes: int = 0

    @property
    def preparation(self) -> Hashable:
        """See `Preparing.preparation`."""
        return "depthwise", self.weight_dims

    def prepare(self, operands: Operands) -> dict[str, torch.Tensor]:
        """See `Preparing.prepare`."""
        return {**operands, "w": operands["w"].flatten(1).t().float().contiguous()}

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ReadyPlan.run`."""
        if tuple(operands["w"].shape) == self.weight_dims:
            operands = self.prepare(operands)
        return self.kernel.run(operands, workspace, out)


def is_served(segment: Segment, sizes: Sizes) -> bool:
    """Whether it starts with a convolution of one channel in and one out for each group and few taps, in one
    type, and all that is no weight lies channels-last."""
    if not segment.operations or segment.operations[0].kind in TRANSPOSED:
        return False
    groups, w = segment.operations[0].attribute("groups"), sizes["w"]
    return (
        groups > 1
        and len({segment.operand(name).dtype for name in ("x", "w", OUTPUT)}) == 1
        and groups == w[0] == sizes["x"][1]
        and math.prod(w[2:]) <= MAX_TAPS
        and all(o.layout == CHANNELS_LAST for o in segment.operands if o.role != "weight")
    )


def tiles(conv: Operation, sizes: Sizes) -> list[Tile]:
    """`TILES` for these sizes: none twice the output or more, none that reaches further than `MAX_SPAN`,
    and one channel a thread where they are odd."""
    channels, (_, rows, columns) = sizes["x"][1], _volume(sizes[OUTPUT][2:])
    per_axis = (_volume(v) for v in (sizes["w"][2:], conv.attribute("stride"), conv.attribute("dilation")))
    _, on_rows, on_columns = zip(*per_axis, strict=True)

    def span(count: int, kernel: int, stride: int, dilation: int) -> int:
        return (count - 1) * stride + (kernel - 1) * dilation + 1

    fitting = [
        (p, q, vector if channels % vector == 0 else 1)
        for p, q, vector in TILES
        if p < 2 * rows and q < 2 * columns and max(span(p, *on_rows), span(q, *on_columns)) <= MAX_SPAN
    ]
    return list(dict.fromkeys(fitting))


def source(segment: Segment, sizes: Sizes, tile: Tile) -> str:
    """The kernel's text at these sizes, for what a thread computes."""
    n, c, *image = sizes["x"]
    conv = segment.operations[0]
    definitions: dict[str, object] = {
        "Element": TYPES[segment.operand(OUTPUT).dtype],
        "BLOCK": _BLOCK,
        "N": n,
        "C": c,
        **dict(zip("DHW", _volume(image), strict=True)),
        **dict(zip("OPQ", _volume(sizes[OUTPUT][2:]), strict=True)),
        **dict(zip(("TILE_P", "TILE_Q", "VECTOR"), tile, strict=True)),
        **_on_axes("KERNEL", sizes["w"][2:]),
        **_on_axes("STRIDE", conv.attribute("stride")),
        **_on_axes("DILATION", conv.attribute("dilation")),
        **_on_axes("BEFORE", conv.attribute("padding_before"), 0),
        "PARAMETERS": parameters(segment, {"w": "float"}),
        "EPILOGUE(v, channel, index)": epilogue(segment, segment.operations[1:]),
    }
    return with_macros("depthwise.cu", definitions)


def _volume(sizes: Sequence[int], fill: int = 1) -> tuple[int, ...]:
    """Sizes of one to three spatial axes as those of three."""
    return (*(fill,) * (3 - len(sizes)), *sizes)


def _on_axes(name: str, sizes: Sequence[int], fill: int = 1) -> dict[str, int]:
    return {f"{name}_{axis}": size for axis, size in zip("DHW", _volume(sizes, fill), strict=True)}


def _launch(segment: Segment, sizes: Sizes, tile: Tile) -> Launch:
    n, c, *output = sizes[OUTPUT]
    depth, rows, columns = _volume(output)
    p, q, vector = tile
    threads = n * depth * -(-rows // p) * -(-columns // q) * (c // vector)
    blocks = -(-threads // _BLOCK)
    buffers = tuple(Argument(None, number) for number in range(len(segment.operands)))
    return Launch(0, "depthwise", (blocks, 1, 1), (_BLOCK, 1, 1), 0, buffers)

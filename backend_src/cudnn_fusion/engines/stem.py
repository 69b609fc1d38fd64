"""A network's first convolution, of images of few channels, and the max-pool behind it in one kernel.

cuDNN's kernels for tensor cores want eight channels and more: an image of three is mostly zeros to them. The
source is ``stem.cu``, see `cudnn_fusion.engines.cuda_source`.

Source of facts: PTX ISA (mma.m16n8k16 and how it deals its matrices to threads, cp.async, max.NaN: compute
capability 8.0 and later), CUDA C++ programming guide (shared memory of a multiprocessor).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError, Operands, Sizes
from cudnn_fusion.engines.cuda_source import TYPES, compiled, epilogue, parameters, with_macros
from cudnn_fusion.engines.gpu_kernels import Argument, Kernels, Launch
from cudnn_fusion.engines.kernels_plan import KernelsPlan, load_kernels
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import CHANNELS_LAST, MAX_STEM_CHANNELS, OUTPUT, PADDED, POOL, Operation, Segment

FORM = "direct"
Tile = tuple[int, int, int, int, int]
"""Rows and columns of the output that a block computes, tiles of 16 outputs that a warp takes at a time,
warps along the outputs, and whether warps hold their weights in registers."""
TILES: tuple[Tile, ...] = (
    (8, 8, 2, 2, 0),
    (8, 16, 2, 4, 0),
    (8, 32, 2, 4, 0),
    (16, 16, 2, 8, 0),
    (4, 28, 2, 4, 0),
    (4, 64, 4, 4, 0),
    (8, 8, 1, 2, 1),
    (8, 8, 2, 2, 1),
    (8, 16, 2, 2, 1),
    (8, 16, 2, 4, 1),
    (8, 32, 2, 4, 1),
)
POOLED_TILES: tuple[Tile, ...] = (
    (2, 7, 1, 5, 0),
    (4, 4, 2, 3, 0),
    (4, 8, 2, 5, 0),
    (7, 7, 1, 8, 0),
    (7, 7, 2, 4, 0),
    (2, 7, 1, 5, 1),
    (3, 7, 2, 2, 1),
    (4, 4, 2, 3, 1),
    (4, 8, 1, 5, 1),
    (7, 7, 1, 2, 1),
    (7, 7, 2, 2, 1),
    (7, 7, 2, 4, 1),
    (7, 14, 2, 2, 1),
)
FIRST_CAPABILITY = (8, 0)
RESERVED_BYTES = 1024
"""Shared memory of a multiprocessor that each block takes beside its own."""
MAX_HELD = 112
"""Registers of a thread for weights."""
MAX_TAPS = 128
"""Positions of the kernel: each is written out in the code."""


class StemEngine:
    """Compiles convolutions of few channels for CUDA device ``device``."""

    name = "stem"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def candidates(self, segment: Segment, sizes: Sizes, only: str | None = None) -> list[Candidate]:
        """One for each tile that fits, for what `is_served` names; if they are of the form ``only``."""
        if only not in (None, FORM) or not is_served(segment, sizes):
            return []
        if torch.cuda.get_device_capability(self.device) < FIRST_CAPABILITY:
            return []
        device = torch.cuda.get_device_properties(self.device)
        limit = device.shared_memory_per_multiprocessor - RESERVED_BYTES
        tiles = POOLED_TILES if _pool(segment) else TILES
        rows, columns = sizes[OUTPUT][2:]
        return [
            Candidate(self.name, FORM, "x".join(map(str, tile)))
            for tile in tiles
            if tile[0] < 2 * rows and tile[1] < 2 * columns and _Kernel(segment, sizes, tile).fits(limit)
        ]

    def build(self, segment: Segment, sizes: Sizes, candidate: Candidate) -> BuiltPlan:
        """Compiles for these sizes. Raises CandidateRejectedError."""
        p, q, at_once, warps, held = map(int, candidate.plan_name.split("x"))
        kernel = _Kernel(segment, sizes, (p, q, at_once, warps, held))
        device = torch.cuda.get_device_properties(self.device)
        resident = kernel.resident(device)
        text = kernel.source(resident)
        code = compiled("stem.cu", text, (device.major, device.minor), "--prec-div=false", "--ftz=true")
        launch = kernel.launch(resident * device.multi_processor_count)
        return BuiltPlan(candidate, Kernels((launch,), (code,), 0).to_bytes(), 0)

    def load(
        self, segment: Segment, sizes: Sizes, candidate: Candidate, blob: bytes | None, workspace_bytes: int
    ) -> StemPlan:
        """Loads the machine code. Raises CandidateRejectedError."""
        if not is_served(segment, sizes):
            raise CandidateRejectedError("a plan of a convolution of few channels for what is none")
        kernel = load_kernels(segment, sizes, blob)
        if kernel.workspace_bytes:
            raise CandidateRejectedError("a plan of a convolution of few channels that needs a workspace")
        return StemPlan(kernel, tuple(sizes["w"]))


@dataclass(frozen=True)
class StemPlan:
    """The kernel with the segment's buffers. It reads weights as its threads take them, see `prepare`."""

    kernel: KernelsPlan
    weight_dims: tuple[int, ...]
    workspace_bytes: int = 0

    @property
    def preparation(self) -> Hashable:
        """See `Preparing.preparation`."""
        return "stem", self.weight_dims

    def prepare(self, operands: Operands) -> dict[str, torch.Tensor]:
        """See `Preparing.prepare`."""
        return {**operands, "w": dealt_weights(operands["w"])}

    def run(
        self, operands: Operands, workspace: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ReadyPlan.run`."""
        if tuple(operands["w"].shape) == self.weight_dims:
            operands = self.prepare(operands)
        return self.kernel.run(operands, workspace, out)


def is_served(segment: Segment, sizes: Sizes) -> bool:
    """Whether it starts with a convolution of images of few channels by few taps in half precision, all that
    is no weight lies channels-last, and its channels are a multiple of eight."""
    if not segment.operations or segment.operations[0].kind != "conv2d":
        return False
    w = sizes["w"]
    return (
        segment.operations[0].attribute("groups") == 1
        and {segment.operand(name).dtype for name in ("x", "w", OUTPUT)} in ({"float16"}, {"bfloat16"})
        and w[0] % 8 == 0
        and w[1] <= MAX_STEM_CHANNELS
        and w[2] * w[3] <= MAX_TAPS
        and segment.operand("x").layout in (CHANNELS_LAST, PADDED)
        and all(o.layout == CHANNELS_LAST for o in segment.operands[1:] if o.role != "weight")
        and not (_pool(segment) and any(op.kind == "add" for op in segment.operations))
    )


def dealt_weights(w: torch.Tensor) -> torch.Tensor:
    """Weights [K, C, R, S] in the order in which threads take them, one dimension, with zeros for channels up
    to four and for positions up to a multiple of four.

    From the outermost: groups of channels, four positions each (a step), pairs of 8 channels, 32 lanes, the
    pair's two, four channels of the image. Lane 4 n + t has position t of a step, and of 8 channels the n-th.
    They are so dealt that a lane's sums, columns 2 t and 2 t + 1 of each product, follow each other.
    """
    k, c, *kernel = w.shape
    taps = kernel[0] * kernel[1]
    steps, group = -(-taps // 4), _vector(k) // 2
    whole = w.new_zeros(k, 4, steps * 4)
    whole[:, :c, :taps] = w.flatten(2)
    pair = min(group, 2)
    parts = whole.reshape(k // (8 * group), 4, group // pair, pair, 2, 4, steps, 4)
    return parts.permute(0, 6, 2, 1, 4, 7, 3, 5).reshape(-1)


def _vector(channels: int) -> int:
    """Output channels that follow each other in one thread."""
    return 8 if channels % 32 == 0 else 4 if channels % 16 == 0 else 2


def _pool(segment: Segment) -> Operation | None:
    last = segment.operations[-1]
    return last if last.kind == POOL else None


@dataclass(frozen=True)
class _Kernel:
    """The kernel at given sizes."""

    segment: Segment
    sizes: Sizes
    tile: Tile

    @property
    def steps(self) -> int:
        """Steps of the matrix product: four positions of the kernel each."""
        _, _, *kernel = self.sizes["w"]
        return -(-kernel[0] * kernel[1] // 4)

    @property
    def group(self) -> int:
        """Channels that are dealt together."""
        return 4 * _vector(self.sizes["w"][0])

    @property
    def held_registers(self) -> int:
        """Registers of a thread for the weights of a group, if warps hold them."""
        return self.steps * self.group // 4 if self.tile[4] else 0

    @property
    def block_channels(self) -> int:
        """Output channels of a block: what a thread sums fits its registers, or the warps 256 threads."""
        channels, (_, _, at_once, warps, held) = self.sizes["w"][0], self.tile
        most = max(1, 8 // warps) * self.group if held else max(256 // at_once, self.group)
        return max(size for size in range(self.group, most + 1, self.group) if channels % size == 0)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.tile[3] * (self.block_channels // self.group if self.tile[4] else 1)

    def fits(self, shared_limit: int) -> bool:
        """Whether a block's needs are within a multiprocessor's means."""
        return self.shared <= shared_limit and self.held_registers <= MAX_HELD

    @property
    def window(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Kernel, stride and padding of the pool; of none, what changes nothing."""
        pool = _pool(self.segment)
        if pool is None:
            return (1, 1), (1, 1), (0, 0)
        return pool.attribute("kernel"), pool.attribute("stride"), pool.attribute("padding")

    @property
    def conv_tile(self) -> tuple[int, int]:
        """Rows and columns of the convolution's output that a block needs."""
        kernel, stride, _ = self.window
        p, q = ((self.tile[i] - 1) * stride[i] + kernel[i] for i in (0, 1))
        return p, q

    @property
    def buffers(self) -> int:
        """Parts of the image in shared memory: a block that also takes maxima fetches the next one then."""
        return 1 if _pool(self.segment) else 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as ``stem.cu`` divides it."""
        conv, kernel = self.segment.operations[0], self.sizes["w"][2:]
        stride, dilation = conv.attribute("stride"), conv.attribute("dilation")
        rows, columns = (
            (self.conv_tile[i] - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1 for i in (0, 1)
        )
        weights = 0 if self.tile[4] else self.steps * self.block_channels * 32
        images = (self.buffers * (rows * columns + 1) * 8 + 15) // 16 * 16
        waiting = self.conv_tile[0] * self.conv_tile[1] * (self.block_channels + 8) * 2
        return int(weights + images + (waiting if _pool(self.segment) else 0))

    def resident(self, device: Any) -> int:  # torch's class for it is private
        """Blocks that a multiprocessor holds at a time."""
        channels = self.group if self.tile[4] else self.block_channels
        registers = self.held_registers + 4 * self.tile[2] * (channels // 8) + (48 if self.tile[4] else 64)
        by_memory = device.shared_memory_per_multiprocessor // (self.shared + RESERVED_BYTES)
        by_registers = device.regs_per_multiprocessor // (registers * self.warps * 32)
        return int(max(1, min(by_memory, by_registers, 8)))

    def source(self, resident: int) -> str:
        """The kernel's text, compiled so that a multiprocessor holds as many blocks."""
        segment, sizes, pool = self.segment, self.sizes, _pool(self.segment)
        conv, kernel = segment.operations[0], sizes["w"][2:]
        n, c, h, w = sizes["x"]
        p, q = segment.convolved_dims(sizes)[2:]
        definitions: dict[str, object] = {
            "Element": TYPES[segment.operand(OUTPUT).dtype],
            "TYPE": '"f16"' if segment.operand(OUTPUT).dtype == "float16" else '"bf16"',
            "N": n,
            "C": c,
            "H": h,
            "W": w,
            "PIXEL": 4 if segment.operand("x").layout == PADDED else c,
            "K": sizes["w"][0],
            "P": p,
            "Q": q,
            "OUT_P": sizes[OUTPUT][2],
            "OUT_Q": sizes[OUTPUT][3],
            **_on_axes("KERNEL", kernel),
            **_on_axes("STRIDE", conv.attribute("stride")),
            **_on_axes("DILATION", conv.attribute("dilation")),
            **_on_axes("BEFORE", conv.attribute("padding_before")),
            "POOL": int(pool is not None),
            **_on_axes("POOL_KERNEL", self.window[0]),
            **_on_axes("POOL_STRIDE", self.window[1]),
            **_on_axes("POOL_BEFORE", self.window[2]),
            **dict(zip(("TILE_P", "TILE_Q", "TILES_M", "WARPS", "HELD"), self.tile, strict=True)),
            "BLOCK_K": self.block_channels,
            "VECTOR": _vector(sizes["w"][0]),
            "BUFFERS": self.buffers,
            "RESIDENT": resident,
            "PARAMETERS": parameters(segment, {}),
            "EPILOGUE(v, channel, index)": epilogue(segment, segment.operations[1 : -1 if pool else None]),
        }
        return with_macros("stem.cu", definitions)

    def launch(self, at_once: int) -> Launch:
        """The launch where the GPU holds so many blocks at a time."""
        batch, channels, rows, columns = self.sizes[OUTPUT]
        tiles = batch * -(-rows // self.tile[0]) * -(-columns // self.tile[1])
        buffers = tuple(Argument(None, number) for number in range(len(self.segment.operands)))
        across = channels // self.block_channels
        grid = (min(tiles, max(1, at_once // across)), across, 1)
        return Launch(0, "stem", grid, (self.warps * 32, 1, 1), self.shared, buffers)


def _on_axes(name: str, sizes: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_H": sizes[0], f"{name}_W": sizes[1]}

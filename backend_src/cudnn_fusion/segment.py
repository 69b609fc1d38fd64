"""A segment: a run of operations that one execution plan can serve.

A segment is a chain. It starts with a convolution of ``x`` by ``w``; every further operation takes the
chain's value and at most one more operand. Sizes are those of two spatial axes; with one or three of them
dims have as many fewer or more: [N,C,L] or [N,C,D,H,W], per-channel operands [1,K,1] or [1,K,1,1,1].

================  ==========================================================  ==========
kind              value                                                       operand
================  ==========================================================  ==========
conv1d, conv2d,   cross-correlation of x [N,C,H,W] with w [K,C/groups,R,S]    ``w``
conv3d
conv_transpose1d, what a convolution with these attributes and                ``w``
conv_transpose2d  w [C,K/groups,R,S] gives back as the gradient of its input
bias              value + bias                                                [1,K,1,1]
scale             value * scale                                               [1,K,1,1]
shift             value + shift                                               [1,K,1,1]
add               value + residual                                            [N,K,P,Q]
an activation     one of `ACTIVATIONS`; ``leaky_relu`` has the attribute      none
                  ``negative_slope``, ``elu`` has ``alpha``; ``gelu`` is
                  exact, ``gelu_tanh`` its approximation
max_pool2d        the largest of each window, last in its chain; attributes   none
                  ``kernel``, ``stride`` and ``padding``, two sizes each
================  ==========================================================  ==========

Dimensions are logical (N, C, then the spatial axes); ``layout`` says how they lie in memory.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_fusion.plan import PlanKey, canonical_json

Attribute = int | float | tuple[int, ...]
Dims = tuple[int, ...]

ACTIVATIONS = (
    "relu",
    "relu6",
    "leaky_relu",
    "silu",
    "sigmoid",
    "tanh",
    "elu",
    "gelu",
    "gelu_tanh",
    "hardswish",
    "hardsigmoid",
)
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", *TRANSPOSED)
POOL = "max_pool2d"
OUTPUT = "y"
CHANNELS_LAST = "channels_last"
PADDED = "channels_last_padded"
ROW_MAJOR = "row_major"
MAX_STEM_CHANNELS = 4
"""Channels of an image that is a network's input: a max-pool behind its convolution is in the chain."""
FLOATING = ("float32", "float16", "bfloat16")
"""Types of values that a segment may have."""


@dataclass(frozen=True)
class Operation:
    """One step of the chain. ``operand`` names the further operand it takes, if any."""

    kind: str
    operand: str | None = None
    attributes: tuple[tuple[str, Attribute], ...] = ()

    def attribute(self, name: str) -> Any:
        """The attribute's value; KeyError if the operation has none of that name."""
        return dict(self.attributes)[name]


@dataclass(frozen=True)
class Operand:
    """A tensor that a segment reads or writes.

    ``dtype`` is torch's name without prefix. ``layout`` is ``channels_last`` or ``row_major``. ``role`` is
    ``input`` (changes from request to request), ``weight`` or ``output``.
    """

    name: str
    dtype: str
    layout: str
    role: str


@dataclass(frozen=True)
class Segment:
    """Operations and operands, without sizes and without weights' values: two layers that differ in nothing
    else share their plans. Operands are in the order in which the chain takes them, ``y`` last."""

    operations: tuple[Operation, ...]
    operands: tuple[Operand, ...]
    precision: str

    def signature(self) -> str:
        """sha256 over everything but sizes: kinds, attributes, dtypes, layouts, roles."""
        description = {
            "operations": [
                [op.kind, op.operand, [[name, value] for name, value in sorted(op.attributes)]]
                for op in self.operations
            ],
            "operands": [[o.name, o.dtype, o.layout, o.role] for o in self.operands],
        }
        return hashlib.sha256(canonical_json(description).encode()).hexdigest()

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Every operand that is read."""
        return self.operands[:-1]

    def operand(self, name: str) -> Operand:
        """The operand called ``name``; KeyError if there is none."""
        return {o.name: o for o in self.operands}[name]

    def is_per_channel(self, operand: str) -> bool:
        """Whether an operand has one element a channel: its dims follow from the value it meets."""
        return any(op.operand == operand and op.kind in ("bias", "scale", "shift") for op in self.operations)

    def describe(self) -> str:
        """Short text: ``conv2d+bias+relu``."""
        return "+".join(op.kind for op in self.operations)

    def output_dims(self, sizes: Mapping[str, Dims]) -> Dims:
        """Dimensions [N, K, P, Q] of the result, from those of ``x`` and ``w``."""
        batch, channels, *spatial = self.convolved_dims(sizes)
        if self.operations[-1].kind == POOL:
            kernel, stride, padding = (
                self.operations[-1].attribute(a) for a in ("kernel", "stride", "padding")
            )
            spatial = [(spatial[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1)]
        return (batch, channels, *spatial)

    def convolved_dims(self, sizes: Mapping[str, Dims]) -> Dims:
        """Dimensions of what the convolution gives, from those of ``x`` and ``w``."""
        conv = self.operations[0]
        x, w = sizes["x"], sizes["w"]
        before, after = conv.attribute("padding_before"), conv.attribute("padding_after")
        stride, dilation = conv.attribute("stride"), conv.attribute("dilation")
        # What the kernel reaches beyond its first element, less the padding.
        reach = [d * (r - 1) - b - a for d, r, b, a in zip(dilation, w[2:], before, after, strict=True)]
        if conv.kind in TRANSPOSED:
            more = conv.attribute("output_padding")
            spatial = [(x[2 + i] - 1) * stride[i] + reach[i] + more[i] + 1 for i in range(len(stride))]
            return (x[0], w[1] * conv.attribute("groups"), *spatial)
        return (x[0], w[0], *((x[2 + i] - reach[i] - 1) // stride[i] + 1 for i in range(len(stride))))

    def key(self, sizes: Mapping[str, Dims], validation: str) -> PlanKey:
        """The key of a plan for these sizes of every operand, ``y`` included."""
        return PlanKey(
            signature=self.signature(),
            sizes=tuple(
                (o.name, tuple(sizes[o.name]), packed_strides(sizes[o.name], o.layout)) for o in self.operands
            ),
            precision=self.precision,
            validation=validation,
        )


@dataclass(frozen=True)
class SegmentSite:
    """A segment's place in a program.

    ``values`` maps operand names to the names of the program's values, ``y`` to the one the site produces.
    ``covers`` holds every node that the segment stands for; ``name`` is its
    convolution's, for a region its last node's.
    """

    name: str
    segment: Segment
    values: tuple[tuple[str, str], ...]
    covers: frozenset[str]

    def value(self, operand: str) -> str:
        """The program value that ``operand`` is; KeyError if the segment has no such operand."""
        return dict(self.values)[operand]


def per_channel_dims(channels: int, rank: int) -> Dims:
    """Dims [1, K, 1, ...] of a per-channel operand beside values of ``rank`` dimensions."""
    return (1, channels, *(1,) * (rank - 2))


def image_dims(dims: Dims) -> Dims:
    """[N, C, L] as the image of height 1 that it is, [N, C, 1, L], in the same memory; others as they are.

    Libraries that know no 1-D convolution take it so: see `image_operation`.
    """
    return (*dims[:2], 1, dims[2]) if len(dims) == 3 else dims


@functools.lru_cache(maxsize=1024)
def image_operation(operation: Operation) -> Operation:
    """The 2-D convolution that a 1-D one is on `image_dims`; other operations as they are."""
    if not operation.kind.endswith("1d"):
        return operation
    height = {"padding_before": 0, "padding_after": 0, "output_padding": 0, "stride": 1, "dilation": 1}
    attributes = tuple(
        (name, (height[name], *value) if isinstance(value, tuple) else value)
        for name, value in operation.attributes
    )
    return Operation(operation.kind.replace("1d", "2d"), operation.operand, attributes)


def padded_dims(dims: Dims, layout: str) -> Dims:
    """Dims with the channels that a padded layout adds, [N, 4, H, W] for [N, 3, H, W]; else as they are."""
    n, c, *spatial = dims
    return (n, -(-c // 4) * 4, *spatial) if layout == PADDED else dims


@functools.lru_cache(maxsize=4096)
def packed_strides(dims: Dims, layout: str) -> Dims:
    """Strides in elements of a packed tensor; ``channels_last`` is N, then the spatial axes, then C;
    ``channels_last_padded`` the same with zeros up to a multiple of four channels.

    They follow from dims and layout alone, so an axis of size 1, whose stride a tensor may state in any way,
    has one canonical stride. Raises ValueError for an unknown layout or channels-last of other than one to
    three spatial axes.
    """
    if layout in (CHANNELS_LAST, PADDED):
        if not 3 <= len(dims) <= 5:
            raise ValueError(f"{layout} needs 3 to 5 dimensions (N, C, 1 to 3 spatial axes), got {dims}")
        n, c, *spatial = padded_dims(dims, layout)
        batch, *inner = packed_strides((n, *spatial, c), "row_major")
        return (batch, 1, *inner[:-1])
    if layout != "row_major":
        raise ValueError(f"unknown layout {layout!r}; expected {CHANNELS_LAST}, {PADDED} or row_major")
    strides: list[int] = []
    step = 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_packed(tensor: torch.Tensor, layout: str) -> bool:
    """Whether elements lie as `packed_strides` says, whatever stride the axes of size 1 state."""
    expected = packed_strides(tuple(tensor.shape), layout)
    return tensor.numel() == 0 or all(
        size == 1 or stride == want
        for size, stride, want in zip(tensor.shape, tensor.stride(), expected, strict=True)
    )


def spanned(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to behind its last, those that lie between them included."""
    if not tensor.numel():
        return 0
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def to_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor itself when it already lies as ``layout`` says, else a packed copy."""
    if is_packed(tensor, layout):
        return tensor
    copy = empty(tuple(tensor.shape), layout, tensor.dtype, tensor.device)
    copy.copy_(tensor)
    return copy


def empty(dims: Dims, layout: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised packed tensor; allocated in its final layout, without any copy kernel.

    What lies between the elements of a padded one is zero.
    """
    if layout == PADDED:
        whole = padded_dims(dims, layout)
        return torch.zeros(math.prod(whole), dtype=dtype, device=device).as_strided(
            dims, packed_strides(dims, layout)
        )
    return torch.empty_strided(dims, packed_strides(dims, layout), dtype=dtype, device=device)

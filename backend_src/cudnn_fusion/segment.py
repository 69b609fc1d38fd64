"""A segment: a run of operations that one execution plan can serve.

A segment is a chain. It starts with a convolution of ``x`` by ``w``; every further operation takes the
chain's value and at most one more operand:

==========  ==========================================================  ==========
kind        value                                                       operand
==========  ==========================================================  ==========
conv2d      cross-correlation of x [N,C,H,W] with w [K,C/groups,R,S]    ``w``
bias        value + bias                                                [1,K,1,1]
scale       value * scale                                               [1,K,1,1]
shift       value + shift                                               [1,K,1,1]
add         value + residual                                            [N,K,P,Q]
relu, relu6, leaky_relu, silu, sigmoid, tanh                            none
==========  ==========================================================  ==========

Dimensions are logical (N, C, H, W); ``layout`` says how they lie in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_fusion.plan import PlanKey, canonical_json

Attribute = int | float | tuple[int, ...]
Dims = tuple[int, ...]

ACTIVATIONS = ("relu", "relu6", "leaky_relu", "silu", "sigmoid", "tanh")
OUTPUT = "y"


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

    def describe(self) -> str:
        """Short text: ``conv2d+bias+relu``."""
        return "+".join(op.kind for op in self.operations)

    def output_dims(self, sizes: Mapping[str, Dims]) -> Dims:
        """Dimensions [N, K, P, Q] of the result, from those of ``x`` and ``w``."""
        conv = self.operations[0]
        x, w = sizes["x"], sizes["w"]
        before, after = conv.attribute("padding_before"), conv.attribute("padding_after")
        stride, dilation = conv.attribute("stride"), conv.attribute("dilation")
        spatial = tuple(
            (x[2 + i] + before[i] + after[i] - dilation[i] * (w[2 + i] - 1) - 1) // stride[i] + 1
            for i in range(2)
        )
        return (x[0], w[0], *spatial)

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


def packed_strides(dims: Dims, layout: str) -> Dims:
    """Strides in elements of a packed tensor.

    They follow from dims and layout alone, so an axis of size 1, whose stride a tensor may state in any way,
    has one canonical stride. Raises ValueError for an unknown layout or channels-last that is not 4-D.
    """
    if layout == "channels_last":
        if len(dims) != 4:
            raise ValueError(f"channels_last needs 4 dimensions (N, C, H, W), got {dims}")
        _, c, h, w = dims
        return (c * h * w, 1, c * w, c)
    if layout != "row_major":
        raise ValueError(f"unknown layout {layout!r}; expected channels_last or row_major")
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


def to_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor itself when it already lies as ``layout`` says, else a packed copy."""
    if is_packed(tensor, layout):
        return tensor
    copy = empty(tuple(tensor.shape), layout, tensor.dtype, tensor.device)
    copy.copy_(tensor)
    return copy


def empty(dims: Dims, layout: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised packed tensor; allocated in its final layout, without any copy kernel."""
    return torch.empty_strided(dims, packed_strides(dims, layout), dtype=dtype, device=device)

"""Convolutions with neighbours along their innermost axis folded into the channels.

In channels-last memory ``f`` neighbouring positions along the last axis (of more than one position) are
``f * C`` consecutive elements:
the same bytes are an image with ``f`` times the channels and an ``f``-th of the positions. A convolution with
stride ``s`` is one with stride 1 on that, which gives ``f / s`` neighbouring outputs as so many times the
channels: its result lies where it should. Only its weights are others, filled up with zeros.

It pays where a convolution has fewer channels than the tiles of a matrix product want (a first layer, audio):
kernels fill those tiles up with zeros, and take one step or more for each position of the kernel.

The zeros have an effect: a NaN also reaches outputs of its row that do not depend on it, up to ``f``
positions away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from cudnn_fusion.engines.base import Operands, Sizes
from cudnn_fusion.segment import (
    CHANNELS_LAST,
    OUTPUT,
    PADDED,
    TRANSPOSED,
    Dims,
    Operation,
    Segment,
    padded_dims,
    to_layout,
)

MOST = 3
"""So many foldings of a convolution are tried, those with the least work."""
GAIN = 0.8
"""A folding's work must be at most this share of the convolution's own, in whole tiles."""
WEIGHT_LIMIT_BYTES = 32 << 20
TILES = {"fp16": (64, 64), "bf16": (64, 64), "tf32": (32, 64), "fp32": (8, 32)}
"""Channels in and out that a kernel works on at once, in each precision mode."""


@dataclass(frozen=True)
class Folding:
    """One folding of a segment at its sizes.

    ``factor`` positions along ``axis`` make one; ``phases`` is how many outputs make one. ``lowest`` to
    ``highest`` are the offsets of the folded kernel. ``segment`` and ``sizes`` are the folded ones.
    """

    axis: int
    factor: int
    phases: int
    lowest: int
    highest: int
    original: Operation
    stored_channels: int
    segment: Segment
    frozen_sizes: tuple[tuple[str, Dims], ...]

    @property
    def sizes(self) -> Sizes:
        """Dims of the folded operands."""
        return dict(self.frozen_sizes)

    def prepare(self, operands: Operands) -> dict[str, torch.Tensor]:
        """The operands with the segment's weights, channels-last, as those of the folded convolution."""
        prepared = dict(operands)
        for operand in self.segment.inputs:
            weight = operands.get(operand.name)
            if operand.role == "weight" and weight is not None:
                repeats = (1, self.phases, *(1,) * (weight.dim() - 2))
                prepared[operand.name] = (
                    self._kernel(weight) if operand.name == "w" else weight.repeat(repeats)
                )
        return prepared

    def _kernel(self, w: torch.Tensor) -> torch.Tensor:
        """[K, C, ..., R, ...] as [phases * K, factor * C, ..., taps, ...]."""
        before, stride, dilation = _along(self.original, self.axis)
        phase, position = torch.meshgrid(
            torch.arange(self.phases), torch.arange(w.shape[self.axis]), indexing="ij"
        )
        at = phase * stride - before + dilation * position
        offset = at.div(self.factor, rounding_mode="floor")
        used = (offset >= self.lowest) & (offset <= self.highest)
        at_phase, at_place, at_tap, at_position = (
            index[used].to(w.device)
            for index in (phase, at - offset * self.factor, offset - self.lowest, position)
        )
        k, c, *kernel = w.shape
        del kernel[self.axis - 2]
        taps = self.highest - self.lowest + 1
        folded = w.new_zeros(self.phases, self.factor, taps, k, self.stored_channels, *kernel)
        folded[at_phase, at_place, at_tap, :, :c] = w.movedim(self.axis, 0)[at_position]
        folded = folded.movedim((3, 4), (1, 3))  # phases, K, factor, C, taps, the other axes
        folded = folded.movedim(4, 2 + self.axis)
        return to_layout(folded.reshape(self.sizes["w"]), CHANNELS_LAST)


def foldings(segment: Segment, sizes: Sizes) -> list[Folding]:
    """Those that save most work; none for a convolution in groups, a transposed one, or one with channels
    enough."""
    conv = segment.operations[0]
    if conv.kind in TRANSPOSED or conv.attribute("groups") != 1:
        return []
    if any(o.layout not in (CHANNELS_LAST, PADDED) for o in segment.operands):
        return []
    if segment.operand(OUTPUT).layout != CHANNELS_LAST:
        return []
    axis = next((axis for axis in reversed(range(2, len(sizes["x"]))) if sizes["x"][axis] != 1), None)
    if axis is None:
        return []
    limit = GAIN * _work(segment.precision, sizes)
    found = []
    factor = 2
    while factor <= sizes["x"][axis]:
        folding = folding_by(factor, axis, segment, sizes)
        if folding is not None:
            work = _work(segment.precision, folding.sizes)
            bytes_ = math.prod(folding.sizes["w"]) * getattr(torch, segment.operand("w").dtype).itemsize
            if work <= limit and bytes_ <= WEIGHT_LIMIT_BYTES:
                found.append((work, factor, folding))
        factor *= 2
    return [folding for *_, folding in sorted(found, key=lambda item: item[:2])[:MOST]]


def _work(precision: str, sizes: Sizes) -> int:
    """Products in whole tiles."""
    channels, outputs = TILES[precision]
    k, c, *kernel = sizes["w"]
    tiles = math.ceil(c / channels) * math.ceil(k / outputs)
    return tiles * channels * outputs * math.prod(kernel) * math.prod(sizes[OUTPUT][2:])


def folding_by(factor: int, axis: int, segment: Segment, sizes: Sizes) -> Folding | None:
    """The folding of ``factor`` positions along an axis behind which all have one position; None where
    positions, outputs or padding do not allow it."""
    conv = segment.operations[0]
    x, w, y = sizes["x"], sizes["w"], sizes[OUTPUT]
    before, stride, dilation = _along(conv, axis)
    phases = factor // stride
    if factor % stride or x[axis] % factor or y[axis] % phases:
        return None
    if any(size != 1 for dims in (x, w, y) for size in dims[axis + 1 :]):
        return None
    positions, outputs = x[axis] // factor, y[axis] // phases
    # Offsets that only ever meet the padding are left out.
    lowest = max(-before // factor, 1 - outputs)
    highest = min((stride * (phases - 1) - before + dilation * (w[axis] - 1)) // factor, positions - 1)
    after = outputs - 1 + highest - (positions - 1)
    if lowest > 0 or after < 0 or highest < lowest:
        return None
    last = {"padding_before": -lowest, "padding_after": after, "stride": 1, "dilation": 1}
    attributes = tuple(
        (name, _replaced(value, axis - 2, last[name]) if isinstance(value, tuple) else value)
        for name, value in conv.attributes
    )
    stored = padded_dims(x, segment.operand("x").layout)[1]
    folded = {
        name: _viewed(dims, phases, None if segment.is_per_channel(name) else axis)
        for name, dims in sizes.items()
    }
    folded["x"] = _viewed((x[0], stored, *x[2:]), factor, axis)
    folded["w"] = _replaced((w[0] * phases, stored * factor, *w[2:]), axis, highest - lowest + 1)
    return Folding(
        axis,
        factor,
        phases,
        lowest,
        highest,
        conv,
        stored,
        Segment(
            (Operation(conv.kind, "w", attributes), *segment.operations[1:]),
            tuple(replace(o, layout=CHANNELS_LAST) for o in segment.operands),
            segment.precision,
        ),
        tuple(sorted(folded.items())),
    )


def _along(conv: Operation, axis: int) -> tuple[int, int, int]:
    """Padding before, stride and dilation along an axis of the dims."""
    before, stride, dilation = (
        conv.attribute(name)[axis - 2] for name in ("padding_before", "stride", "dilation")
    )
    return before, stride, dilation


def _viewed(dims: Dims, factor: int, axis: int | None) -> Dims:
    """``factor`` times the channels; of the positions along ``axis`` as many fewer."""
    viewed = _replaced(dims, 1, dims[1] * factor)
    return viewed if axis is None else _replaced(viewed, axis, dims[axis] // factor)


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])

"""What a segment's operations mean, in torch: the definition that every engine is measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from cudnn_fusion.regions import Region, evaluate_region
from cudnn_fusion.segment import POOL, TRANSPOSED, Operation, Segment, image_operation

Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Operation], torch.Tensor]


def on_images(convolve: Convolve) -> Convolve:
    """``convolve``, which takes two spatial axes or more, for [N,C,L] too: as images of height 1, views."""

    def convolve_any(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation
    ) -> torch.Tensor:
        if x.dim() != 3:
            return convolve(x, w, bias, operation)
        bias = None if bias is None else bias.unsqueeze(2)
        return convolve(x.unsqueeze(2), w.unsqueeze(2), bias, image_operation(operation)).squeeze(2)

    return convolve_any


# torch's own conv1d makes a row-major copy of an input that lies channels-last.
@on_images
def convolution(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation
) -> torch.Tensor:
    """The convolution as torch does it: operands as `cudnn_fusion.segment` gives them, bias may be None."""
    before, after = operation.attribute("padding_before"), operation.attribute("padding_after")
    stride, dilation = operation.attribute("stride"), operation.attribute("dilation")
    groups = operation.attribute("groups")
    line = None if bias is None else bias.reshape(-1)
    if operation.kind in TRANSPOSED:
        more = operation.attribute("output_padding")
        return F.conv_transpose2d(x, w, line, stride, before, more, groups, dilation)
    padding = before
    if before != after:
        x, padding = padded(x, operation), (0,) * len(before)
    convolve = F.conv2d if operation.kind == "conv2d" else F.conv3d
    return convolve(x, w, line, stride, padding, dilation, groups)


def padded(x: torch.Tensor, operation: Operation) -> torch.Tensor:
    """``x`` with the zeros of a convolution's padding around its spatial axes."""
    sides = zip(operation.attribute("padding_before"), operation.attribute("padding_after"), strict=True)
    amounts = [amount for side in reversed(list(sides)) for amount in side]
    return F.pad(x, amounts) if any(amounts) else x


def pointwise(
    operation: Operation, value: torch.Tensor, operands: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """One operation behind the convolution, in the value's own precision. KeyError for an unknown kind."""
    if operation.operand is not None:
        operand = operands[operation.operand]
        return value * operand if operation.kind == "scale" else value + operand
    if operation.kind == POOL:
        windows = (operation.attribute(name) for name in ("kernel", "stride", "padding"))
        result: torch.Tensor = F.max_pool2d(value, *windows)
        return result
    if operation.kind == "leaky_relu":
        return F.leaky_relu(value, operation.attribute("negative_slope"))
    if operation.kind == "elu":
        return F.elu(value, operation.attribute("alpha"))
    return _ACTIVATIONS[operation.kind](value)


def evaluate(
    operations: Sequence[Operation], operands: Mapping[str, torch.Tensor], convolve: Convolve = convolution
) -> torch.Tensor:
    """A whole chain. Computes in the operands' dtype: float64 operands give the reference.

    ``operands`` maps names to tensors with logical dims as `cudnn_fusion.segment` gives them.
    """
    has_bias = len(operations) > 1 and operations[1].kind == "bias"
    value = convolve(operands["x"], operands["w"], operands["bias"] if has_bias else None, operations[0])
    for operation in operations[2 if has_bias else 1 :]:
        value = pointwise(operation, value, operands)
    return value


def evaluate_segment(
    segment: Segment, operands: Mapping[str, torch.Tensor], convolve: Convolve = convolution
) -> torch.Tensor:
    """A whole segment, be it a chain or a region."""
    if isinstance(segment, Region):
        return evaluate_region(segment, operands)
    return evaluate(segment.operations, operands, convolve)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}

"""What a segment's operations mean, in torch: the definition that every engine is measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from cudnn_fusion.segment import Operation

Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Operation], torch.Tensor]


def conv2d(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operation: Operation) -> torch.Tensor:
    """The convolution as torch does it: x [N,C,H,W], w [K,C/groups,R,S], bias [1,K,1,1] or None."""
    before, after = operation.attribute("padding_before"), operation.attribute("padding_after")
    padding = before
    if before != after:
        x = F.pad(x, (before[1], after[1], before[0], after[0]))
        padding = (0, 0)
    return F.conv2d(
        x,
        w,
        None if bias is None else bias.reshape(-1),
        operation.attribute("stride"),
        padding,
        operation.attribute("dilation"),
        operation.attribute("groups"),
    )


def pointwise(
    operation: Operation, value: torch.Tensor, operands: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """One operation behind the convolution, in the value's own precision. KeyError for an unknown kind."""
    if operation.operand is not None:
        operand = operands[operation.operand]
        return value * operand if operation.kind == "scale" else value + operand
    if operation.kind == "leaky_relu":
        return F.leaky_relu(value, operation.attribute("negative_slope"))
    return _ACTIVATIONS[operation.kind](value)


def evaluate(
    operations: Sequence[Operation], operands: Mapping[str, torch.Tensor], convolve: Convolve = conv2d
) -> torch.Tensor:
    """A whole chain. Computes in the operands' dtype: float64 operands give the reference.

    ``operands`` maps names to tensors with logical dims as `cudnn_fusion.segment` gives them.
    """
    has_bias = len(operations) > 1 and operations[1].kind == "bias"
    value = convolve(operands["x"], operands["w"], operands["bias"] if has_bias else None, operations[0])
    for operation in operations[2 if has_bias else 1 :]:
        value = pointwise(operation, value, operands)
    return value


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

"""How a program writes convolutions, and their arguments in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cudnn_fusion.lowered import Argument, Dim, Node, Ref

CONVOLUTIONS = {f"aten.conv{rank}d.default": rank for rank in (1, 2, 3)}
"""Convolutions by the number of their spatial axes."""

TRANSPOSED_CONVOLUTIONS = {
    "aten.conv_transpose1d.default": 1,
    "aten.conv_transpose2d.input": 2,
    "aten.conv_transpose3d.input": 3,
}
PADDED_BY_NAME = {f"aten.conv{rank}d.padding": rank for rank in (1, 2, 3)}
"""Convolutions whose padding is ``same`` or ``valid``."""

_RANKS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | PADDED_BY_NAME
_DEFAULT_SIZES = (("stride", 1), ("padding", 0), ("dilation", 1))
_ARGUMENT_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def conv_arguments(node: Node) -> tuple[Argument, ...]:
    """x, w, bias, stride, padding, dilation, groups of a convolution, transposed or not.

    Defaults are filled in, and sizes are given for each axis.
    """
    given, rank = _named_arguments(node), _RANKS[node.op]
    sizes = (_each_axis(given.get(name, size), rank) for name, size in _DEFAULT_SIZES)
    return (given["input"], given["weight"], given.get("bias"), *sizes, given.get("groups", 1))


def output_padding(node: Node) -> Argument:
    """Of a transposed convolution, for each axis."""
    return _each_axis(_named_arguments(node).get("output_padding", 0), _RANKS[node.op])


def _named_arguments(node: Node) -> dict[str, Argument]:
    names = _TRANSPOSED_NAMES if node.op in TRANSPOSED_CONVOLUTIONS else _ARGUMENT_NAMES
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _each_axis(value: Argument, rank: int) -> Argument:
    if isinstance(value, tuple):
        return value * rank if len(value) == 1 else value
    return (value,) * rank if isinstance(value, int) else value


def named_convolution(node: Node) -> Node:
    """``aten.convolution.default`` as the operation for its number of axes."""
    *operands, stride, padding, dilation, transposed, output_padding, groups = node.args
    rank = len(node.shape or ()) - 2
    if rank not in (1, 2, 3):
        return node
    if transposed:
        op = next(op for op, axes in TRANSPOSED_CONVOLUTIONS.items() if axes == rank)
        return replace(node, op=op, args=(*operands, stride, padding, output_padding, groups, dilation))
    return replace(node, op=f"aten.conv{rank}d.default", args=(*operands, stride, padding, dilation, groups))


def numeric_padding(
    node: Node, shapes: Mapping[str, tuple[Dim, ...]], names: Callable[[str], str]
) -> list[Node]:
    """A convolution padded by name with its padding in numbers, behind a pad node if the sides differ.

    ``shapes`` are those of the program's values by name; ``names`` makes a name that is free.
    """
    x, weight, bias, stride, mode, dilation, groups = conv_arguments(node)
    if not isinstance(weight, Ref) or weight.name not in shapes or not isinstance(dilation, tuple):
        return [node]
    kernel = [size for size in shapes[weight.name][2:] if isinstance(size, int)]
    totals = [int(d) * (k - 1) if mode == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]  # type: ignore[arg-type]
    before = tuple(total // 2 for total in totals)
    extra = [total % 2 for total in totals]
    pads: list[Node] = []
    if any(extra):
        # The additional element goes after, in the order of constant_pad_nd: last dimension first.
        amounts = tuple(amount for more in reversed(extra) for amount in (0, more))
        pad = Node(
            names(f"{node.name}_pad"),
            "aten.constant_pad_nd.default",
            (x, amounts, 0.0),
            (),
            _extended(shapes.get(x.name) if isinstance(x, Ref) else None, extra),
            node.dtype,
        )
        pads, x = [pad], Ref(pad.name)
    args: tuple[Argument, ...] = (x, weight, bias, stride, before, dilation, groups)
    return [*pads, replace(node, op=node.op.replace("padding", "default"), args=args, kwargs=())]


def _extended(shape: tuple[Dim, ...] | None, extra: list[int]) -> tuple[Dim, ...] | None:
    if shape is None:
        return None
    rank = len(extra)
    added = zip(shape[-rank:], extra, strict=True)
    return (
        *shape[:-rank],
        *(dim + more if isinstance(dim, int) else f"{dim} + {more}" for dim, more in added),
    )

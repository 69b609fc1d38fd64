"""A sum of two 1x1 convolutions as one convolution of their inputs side by side.

Residual networks begin a stage so: a block's last convolution plus the shortcut's. As two, the second reads
the sum so far and writes it again, and each has few channels to sum over. As one over [N, C1 + C2, ...] it is
written once; a region brings the inputs together and takes the positions that a stride leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch

from cudnn_fusion.convolutions import CONVOLUTIONS, conv_arguments
from cudnn_fusion.lowered import Dim, Node, Program, Ref, all_names, free_name, node_references, rebuilt
from cudnn_fusion.passes import remove_unused
from cudnn_fusion.segment import Dims
from cudnn_fusion.values import Values, is_plain_add

PRECISIONS = ("fp16", "bf16")
_TO_THE_END = 2**63 - 1


def join_sums(program: Program) -> Program:
    """The program with every such sum joined, for a GPU; itself where there is none.

    In half precision alone: in others the products take longer than what is moved.
    """
    if program.precision not in PRECISIONS:
        return program
    values, taken = Values(program), all_names(program)
    weights, nodes, joined = dict(program.weights), list[Node](), 0
    for node in program.nodes:
        parts = _parts(node, values, weights)
        made = None if parts is None else _joined(node, parts, values, weights, taken)
        nodes += made or [node]
        joined += made is not None
    if not joined:
        return program
    notes = [f"sums of two 1x1 convolutions joined: {joined}"]
    return remove_unused(rebuilt(replace(program, weights=weights), nodes, {}, notes))


def _parts(node: Node, values: Values, weights: Mapping[str, torch.Tensor]) -> tuple[Node, Node] | None:
    """The two convolutions that ``node`` adds and nothing else reads; None where it adds others."""
    if not is_plain_add(node):
        return None
    found = [values.nodes.get(name) for name in node_references(node)]
    if len(found) != 2 or found[0] is found[1]:
        return None
    if not all(
        part is not None
        and values.only_user(part.name) is node
        and _is_pointwise(part, weights)
        and (part.shape, part.dtype) == (node.shape, node.dtype)
        for part in found
    ):
        return None
    return cast(tuple[Node, Node], tuple(found))


def _is_pointwise(node: Node, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is a convolution by constants of single positions, all channels with all."""
    if node.op not in CONVOLUTIONS or len(node.shape or ()) != CONVOLUTIONS[node.op] + 2:
        return False
    x, w, bias, stride, padding, _, groups = conv_arguments(node)
    if not (isinstance(x, Ref) and isinstance(w, Ref) and w.name in weights and groups == 1):
        return False
    if bias is not None and not (isinstance(bias, Ref) and bias.name in weights):
        return False
    sizes = (*cast(Dims, stride), *cast(Dims, padding))
    if not all(isinstance(size, int) for size in sizes) or any(cast(Dims, padding)):
        return False
    return all(size == 1 for size in weights[w.name].shape[2:])


def _joined(
    node: Node, parts: tuple[Node, Node], values: Values, weights: dict[str, torch.Tensor], taken: set[str]
) -> list[Node] | None:
    """The nodes that take the sum's place; what they read anew goes to ``weights``. None where the biases
    overflow together."""
    made: list[Node] = []
    sources = [_read_positions(part, values, taken, made) for part in parts]
    arguments = [conv_arguments(part) for part in parts]
    kernels = [weights[cast(Ref, w).name] for _, w, *_ in arguments]
    biases = [weights[bias.name] for _, _, bias, *_ in arguments if isinstance(bias, Ref)]
    batch, _, *spatial = cast(tuple[Dim, ...], node.shape)
    both, kernel, bias = (free_name(f"{node.name}_{what}", taken) for what in ("x", "w", "bias"))
    weights[kernel] = torch.cat(kernels, 1)
    channels = int(weights[kernel].shape[1])
    made.append(
        Node(both, "aten.cat.default", (tuple(sources), 1), (), (batch, channels, *spatial), node.dtype)
    )
    if biases:
        total = torch.stack([one.float() for one in biases]).sum(0)
        weights[bias] = total.to(biases[0].dtype)
        if not weights[bias].isfinite().all():
            return None
    ones = (1,) * len(spatial)
    args = (Ref(both), Ref(kernel), Ref(bias) if biases else None, ones, (0,) * len(spatial), ones, 1)
    made.append(replace(node, op=parts[0].op, args=args, kwargs=()))
    return made


def _read_positions(part: Node, values: Values, taken: set[str], made: list[Node]) -> Ref:
    """What a convolution reads: its input, or with a stride slices of it, which go to ``made``."""
    x, _, _, stride, *_ = conv_arguments(part)
    source = cast(Ref, x)
    shape = list(cast(tuple[Dim, ...], values.dims(source.name)))
    for axis, step in enumerate(cast(Dims, stride), start=2):
        if step != 1:
            shape[axis] = cast(tuple[Dim, ...], part.shape)[axis]
            name = free_name(f"{part.name}_x", taken)
            args = (source, axis, 0, _TO_THE_END, step)
            made.append(Node(name, "aten.slice.Tensor", args, (), tuple(shape), part.dtype))
            source = Ref(name)
    return source

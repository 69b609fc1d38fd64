"""Rewrites of a lowered program that keep its answers and leave fewer operations to serve.

Batch norm in inference is a scale and a shift per channel. Directly after a convolution both go into the
convolution's weights. Anywhere else they stay: past a relu the scale would be applied to what was cut off,
and in a following convolution the shift would also be added in the zero padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from cudnn_fusion.convolutions import (
    CONVOLUTIONS,
    PADDED_BY_NAME,
    TRANSPOSED_CONVOLUTIONS,
    conv_arguments,
    named_convolution,
    numeric_padding,
)
from cudnn_fusion.image_linears import linears_as_convolutions
from cudnn_fusion.lowered import (
    Argument,
    Constant,
    Dim,
    Node,
    Program,
    ProgramError,
    Ref,
    all_names,
    dtype_name,
    free_name,
    node_references,
    rebuilt,
    renamed,
)

_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
_FOLDED_INTO = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS
_SAME_VALUE = {
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
}


def optimize(program: Program, originals: Mapping[str, torch.Tensor]) -> Program:
    """``program`` after every pass.

    ``originals`` holds the weights, by name, before they were cast to the program's precision; those missing
    are taken from the program. ProgramError: a weight does not fit the program's data type.
    """
    program = remove_copies(program)
    program = name_convolutions(program)
    program = write_padding_out(program)
    program = fold_batch_norms(program, originals)
    program = write_batch_norms_out(program, originals)
    program = linears_as_convolutions(program)
    program = remove_unused(program)
    _check_range(program, originals)
    return program


def remove_copies(program: Program) -> Program:
    """Takes out nodes whose value is their operand's: clones, detach, dropout, conversions to the same."""
    dtypes = {spec.name: spec.dtype for spec in program.inputs}
    dtypes |= {name: dtype_name(weight.dtype) for name, weight in program.weights.items()}
    dtypes |= {node.name: node.dtype for node in program.nodes if node.dtype}
    same: dict[str, str] = {}
    kept = []
    for node in program.nodes:
        reading = renamed(node, same)
        if _is_copy(reading, dtypes):
            source = reading.args[0]
            assert isinstance(source, Ref)
            same[node.name] = source.name
        else:
            kept.append(reading)
    notes = [f"operations removed because they only copy: {len(same)}"] if same else []
    return rebuilt(program, kept, same, notes)


def _is_copy(node: Node, dtypes: Mapping[str, str]) -> bool:
    if not node.args or not isinstance(node.args[0], Ref):
        return False
    if node.op in _SAME_VALUE:
        return True
    if node.op == "aten.dropout.default":
        return node.args[2] is False
    if node.op in ("aten._to_copy.default", "aten.to.dtype"):
        layout = dict(node.kwargs).get("layout")
        strided = layout is None or layout == Constant("layout", "strided")
        return strided and dtypes.get(node.args[0].name) == node.dtype
    return False


def name_convolutions(program: Program) -> Program:
    """Turns every ``aten.convolution.default`` into the operation for its number of axes."""
    nodes = [named_convolution(n) if n.op == "aten.convolution.default" else n for n in program.nodes]
    return rebuilt(program, nodes, {}, [])


def write_padding_out(program: Program) -> Program:
    """Gives every convolution its seven arguments with padding in numbers.

    ``same`` that needs one more element after than before becomes a pad node in front. Constant
    ``aten.pad.default`` becomes ``aten.constant_pad_nd.default``.
    """
    names = partial(free_name, taken=all_names(program))
    shapes: dict[str, tuple[Dim, ...]] = {
        name: tuple(weight.shape) for name, weight in program.weights.items()
    }
    shapes |= {spec.name: spec.shape for spec in program.inputs}
    shapes |= {node.name: node.shape for node in program.nodes if node.shape is not None}
    nodes: list[Node] = []
    notes = []
    for node in program.nodes:
        if node.op == "aten.pad.default" and (len(node.args) < 3 or node.args[2] == "constant"):
            value = node.args[3] if len(node.args) > 3 and node.args[3] is not None else 0.0
            nodes.append(replace(node, op="aten.constant_pad_nd.default", args=(*node.args[:2], value)))
        elif node.op in PADDED_BY_NAME:
            made = numeric_padding(node, shapes, names)
            nodes += made
            notes += [f"{node.name}: padding written out as a pad node"] if len(made) > 1 else []
        elif node.op in CONVOLUTIONS:
            nodes.append(replace(node, args=conv_arguments(node), kwargs=()))
        else:
            nodes.append(node)
    return rebuilt(program, nodes, {}, notes)


@dataclass(frozen=True)
class _ScaleShift:
    """A batch norm as y = x * scale + shift: both float64 [channels]."""

    scale: torch.Tensor
    shift: torch.Tensor


def fold_batch_norms(program: Program, originals: Mapping[str, torch.Tensor]) -> Program:
    """Folds every batch norm that alone reads a convolution's result into its weight and bias."""
    nodes = {node.name: node for node in program.nodes}
    uses = _use_counts(program)
    weights = dict(program.weights)
    names = partial(free_name, taken=all_names(program))
    changed: dict[str, Node] = {}
    removed: set[str] = set()
    same: dict[str, str] = {}
    notes = []
    for result, norm in _batch_norm_results(program):
        conv = nodes.get(_name_of(norm.args[0]))
        if conv is None or conv.op not in _FOLDED_INTO or uses[conv.name] != 1:
            continue
        x, weight, bias, *_ = conv_arguments(conv)
        affine = _scale_shift(norm, program, originals)
        if affine is None or _name_of(weight) not in weights or (bias and _name_of(bias) not in weights):
            continue
        folded_weight, folded_bias = _folded(conv, affine, program, originals)
        if not (folded_weight.isfinite().all() and folded_bias.isfinite().all()):
            dtype = dtype_name(folded_weight.dtype)
            notes.append(f"{norm.name} is not folded: {conv.name}'s weights would leave the range of {dtype}")
            continue
        new_weight, new_bias = names(f"{conv.name}.folded_weight"), names(f"{conv.name}.folded_bias")
        weights |= {new_weight: folded_weight, new_bias: folded_bias}
        changed[conv.name] = replace(
            conv,
            args=(x, Ref(new_weight), Ref(new_bias), *conv.args[3:]),
            kwargs=tuple(item for item in conv.kwargs if item[0] not in ("input", "weight", "bias")),
        )
        same[result.name] = conv.name
        removed |= {norm.name, result.name}
        notes.append(f"folded {norm.name} into {conv.name}")
    kept = [renamed(changed.get(node.name, node), same) for node in program.nodes if node.name not in removed]
    return rebuilt(replace(program, weights=weights), kept, same, notes)


def _folded(
    conv: Node, affine: _ScaleShift, program: Program, originals: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of ``conv`` with ``affine`` after it, in the data type of its weight."""
    weight, bias = (_name_of(argument) for argument in conv_arguments(conv)[1:3])
    dtype = program.weights[weight].dtype
    full_weight = _full(weight, program, originals)
    full_bias = _full(bias, program, originals) if bias else torch.zeros_like(affine.shift)
    scale = _along_weight(affine.scale, full_weight, conv)
    return (full_weight * scale).to(dtype), (full_bias * affine.scale + affine.shift).to(dtype)


def _along_weight(scale: torch.Tensor, weight: torch.Tensor, conv: Node) -> torch.Tensor:
    """A factor for each output channel, shaped to multiply the convolution's weight."""
    if conv.op not in TRANSPOSED_CONVOLUTIONS:
        return scale.reshape(-1, *[1] * (weight.dim() - 1))
    # [C, K/groups, ...]: the rows of one group make that group's output channels.
    groups = cast(int, conv_arguments(conv)[6])
    rows = scale.view(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
    return rows.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))


def write_batch_norms_out(program: Program, originals: Mapping[str, torch.Tensor]) -> Program:
    """Replaces the batch norms that are left by a multiplication and an addition per channel."""
    weights = dict(program.weights)
    names = partial(free_name, taken=all_names(program))
    written: dict[str, list[Node]] = {}
    notes = []
    for result, norm in _batch_norm_results(program):
        affine = _scale_shift(norm, program, originals)
        if affine is None or result.shape is None or result.dtype is None:
            continue
        written[norm.name] = []
        written[result.name] = _multiply_add(result, norm, affine, weights, names)
        notes.append(f"{norm.name} stays as scale and shift per channel")
    nodes = [made for node in program.nodes for made in written.get(node.name, [node])]
    return rebuilt(replace(program, weights=weights), nodes, {}, notes)


def _multiply_add(
    result: Node,
    norm: Node,
    affine: _ScaleShift,
    weights: dict[str, torch.Tensor],
    names: Callable[[str], str],
) -> list[Node]:
    assert result.shape is not None
    assert result.dtype is not None
    stored: torch.dtype = getattr(torch, result.dtype)
    in_float32 = not _representable(affine, stored)
    dtype = torch.float32 if in_float32 else stored
    rank = len(result.shape)
    scale, shift = names(f"{norm.name}.scale"), names(f"{norm.name}.shift")
    for name, values in ((scale, affine.scale), (shift, affine.shift)):
        weights[name] = values.to(dtype).reshape(1, -1, *[1] * (rank - 2))
    if not in_float32:
        product = Node(
            names(f"{result.name}_scaled"),
            "aten.mul.Tensor",
            (norm.args[0], Ref(scale)),
            (),
            result.shape,
            result.dtype,
        )
        return [product, replace(result, op="aten.add.Tensor", args=(Ref(product.name), Ref(shift)))]
    name = result.name
    wide, product, total = (names(f"{name}_{step}") for step in ("float32", "scaled", "shifted"))  # type: ignore[assignment]
    return [
        _conversion(str(wide), norm.args[0], result, "float32"),
        Node(str(product), "aten.mul.Tensor", (Ref(str(wide)), Ref(scale)), (), result.shape, "float32"),
        Node(str(total), "aten.add.Tensor", (Ref(str(product)), Ref(shift)), (), result.shape, "float32"),
        _conversion(name, Ref(str(total)), result, result.dtype),
    ]


def _conversion(name: str, source: Argument, like: Node, dtype: str) -> Node:
    kwargs = (("dtype", Constant("dtype", dtype)),)
    return Node(name, "aten._to_copy.default", (source,), kwargs, like.shape, dtype)


def _representable(affine: _ScaleShift, dtype: torch.dtype) -> bool:
    """Whether scale and shift keep full precision in ``dtype``: no overflow, no subnormal scale."""
    limits = torch.finfo(dtype)
    sizes = affine.scale.abs()
    small = bool(((sizes != 0) & (sizes < limits.smallest_normal)).any())
    return not small and float(torch.maximum(sizes, affine.shift.abs()).max()) <= limits.max


def _batch_norm_results(program: Program) -> list[tuple[Node, Node]]:
    """Pairs of the node that takes a batch norm's first result, and the batch norm, if only that is used."""
    norms = {node.name: node for node in program.nodes if node.op == _BATCH_NORM}
    takers: dict[str, list[Node]] = {name: [] for name in norms}
    for node in program.nodes:
        for name in node_references(node):
            if name in takers:
                takers[name].append(node)
    uses = _use_counts(program)
    return [
        (taken[0], norms[name])
        for name, taken in takers.items()
        if uses[name] == 1 and taken[0].op == "operator.getitem" and taken[0].args[1] == 0
    ]


def _scale_shift(norm: Node, program: Program, originals: Mapping[str, torch.Tensor]) -> _ScaleShift | None:
    _, weight, bias, mean, variance, _, eps = norm.args
    parts = [part for part in (weight, bias, mean, variance) if part is not None]
    if any(_name_of(part) not in program.weights for part in parts) or not isinstance(eps, int | float):
        return None
    full_variance = _full(_name_of(variance), program, originals)
    scale = torch.rsqrt(full_variance + eps)
    if weight is not None:
        scale = scale * _full(_name_of(weight), program, originals)
    shift = -_full(_name_of(mean), program, originals) * scale
    if bias is not None:
        shift = shift + _full(_name_of(bias), program, originals)
    return _ScaleShift(scale, shift)


def _full(name: str, program: Program, originals: Mapping[str, torch.Tensor]) -> torch.Tensor:
    stored = program.weights[name].detach()
    original = originals.get(name)
    # A weight that was renamed in the program may bear another one's name in the model.
    is_the_same = original is not None and torch.equal(original.to(stored.dtype), stored)
    return (original if original is not None and is_the_same else stored).detach().double()


def remove_unused(program: Program) -> Program:
    """Takes out nodes and weights that no output depends on."""
    needed = {spec.value for spec in program.outputs}
    kept = []
    for node in reversed(program.nodes):
        if node.name in needed:
            kept.append(node)
            needed.update(node_references(node))
    weights = {name: weight for name, weight in program.weights.items() if name in needed}
    return replace(program, nodes=tuple(kept[::-1]), weights=weights)


def _check_range(program: Program, originals: Mapping[str, torch.Tensor]) -> None:
    for name, weight in program.weights.items():
        original = originals.get(name)
        if not weight.is_floating_point() or bool(torch.isfinite(weight).all()):
            continue
        if original is None or bool(torch.isfinite(original).all()):
            raise ProgramError(
                f"weight {name!r} holds values beyond the range of {dtype_name(weight.dtype)}; "
                "use precision bf16 or fp32"
            )


def _use_counts(program: Program) -> Counter[str]:
    """How often each value is read, outputs included."""
    uses = Counter(name for node in program.nodes for name in node_references(node))
    uses.update(spec.value for spec in program.outputs)
    return uses


def _name_of(argument: Argument) -> str:
    return argument.name if isinstance(argument, Ref) else ""

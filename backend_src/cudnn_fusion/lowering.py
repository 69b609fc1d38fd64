"""From torch.export's graph to a lowered program, node by node.

The graph is functional (decomposed with an empty table). What is left behind: assertions, and mutations of
inputs (a request's tensors are nobody's after it). Nested graphs are inlined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils import _pytree as pytree

from cudnn_fusion.declarations import InputDeclaration, dynamic_axes
from cudnn_fusion.dims import axis_names
from cudnn_fusion.lowered import (
    Argument,
    Constant,
    Dim,
    Node,
    Program,
    ProgramError,
    Ref,
    TensorSpec,
    dtype_name,
    free_name,
)
from cudnn_fusion.operations import NAME_OF_FUNCTION, is_random, resolve

_ASSERTIONS = re.compile(r"aten\.(_assert|_functional_assert|sym_constrain_range|_functional_sym_constrain)")
_WEIGHT_KINDS = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
_BY_STRIDES = ("aten.as_strided", "aten.sym_stride", "aten._reshape_alias")


def lower(
    exported: ExportedProgram,
    name: str,
    precision: str,
    declarations: Sequence[InputDeclaration],
    output_names: Sequence[str] | None = None,
) -> Program:
    """The lowered form of ``exported``, which was traced with ``declarations`` in the order of its inputs.

    Inputs keep their declared data types: a floating one that was traced in another type is cast first.
    ``output_names`` replaces the names taken from the model's result. Weights are named as in the model.
    ProgramError: the graph holds something that cannot be served, and what to do about it.
    """
    _refuse_state(exported)
    lowering = _Lowering(exported, declarations)
    results = lowering.graph(exported.graph_module, lowering.placeholders())
    outputs, notes = lowering.outputs(results, output_names)
    return Program(
        name=name,
        precision=precision,
        inputs=tuple(TensorSpec(d.name, dtype_name(d.torch_dtype), d.shape, d.name) for d in declarations),
        outputs=outputs,
        axes=dynamic_axes(declarations),
        batch_axis=None,
        nodes=tuple(lowering.nodes),
        weights=lowering.weights,
        notes=(*lowering.notes, *notes),
    )


def _refuse_state(exported: ExportedProgram) -> None:
    changed = [
        str(spec.target)
        for spec in exported.graph_signature.output_specs
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
    ]
    if changed:
        raise ProgramError(
            f"the model changes its own state on every call ({', '.join(changed)}): answers would depend on "
            "earlier requests. Make the state an input and an output, or stop changing it in eval mode"
        )


class _Lowering:
    """The state of one lowering: names given, symbols known, nodes made so far."""

    def __init__(self, exported: ExportedProgram, declarations: Sequence[InputDeclaration]) -> None:
        self._exported = exported
        self._declarations = declarations
        self._axis_of: dict[sympy.Symbol, sympy.Symbol] = {}
        self._taken = {declaration.name for declaration in declarations}
        self.nodes: list[Node] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []

    def placeholders(self) -> list[Argument]:
        """What each placeholder of the graph stands for, in order."""
        user_inputs = self._user_input_declarations()
        placeholders = [node for node in self._exported.graph.nodes if node.op == "placeholder"]
        specs = self._exported.graph_signature.input_specs
        stored: dict[tuple[Any, ...], str] = {}
        values: list[Argument] = []
        for node, spec in zip(placeholders, specs, strict=True):
            if spec.kind in _WEIGHT_KINDS:
                values.append(self._weight(str(spec.target), stored))
            elif spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                self._learn_axes(user_inputs[node.name], node.meta["val"])
                values.append(Ref(user_inputs[node.name].name))
            elif spec.kind == InputKind.USER_INPUT:
                values.append(None)
            else:
                raise ProgramError(
                    f"the model holds {spec.target!r}, a {spec.kind.name.lower().replace('_', ' ')}, which "
                    "cannot be served: keep only tensors in the model"
                )
        self._taken |= self.weights.keys()
        used = {node.name for node in placeholders if node.users}
        for position, (node, spec) in enumerate(zip(placeholders, specs, strict=True)):
            if spec.kind == InputKind.USER_INPUT and node.name in used:
                values[position] = self._cast_at_entry(user_inputs[node.name], node.meta["val"])
        return values

    def _user_input_declarations(self) -> dict[str, InputDeclaration]:
        names = [
            spec.arg.name
            for spec in self._exported.graph_signature.input_specs
            if spec.kind == InputKind.USER_INPUT
        ]
        in_spec = self._exported.call_spec.in_spec
        args, kwargs = pytree.tree_unflatten(list(range(len(names))), in_spec)
        positions = [*pytree.tree_leaves(args)]
        by_name = {d.name: d for d in self._declarations}
        declared = dict(zip(positions, self._declarations, strict=False))
        declared |= {position: by_name[name] for name, position in kwargs.items()}
        return {name: declared[position] for position, name in enumerate(names)}

    def _weight(self, target: str, stored: dict[tuple[Any, ...], str]) -> Ref:
        exported = self._exported
        tensor = exported.state_dict.get(target, exported.constants.get(target))
        if not isinstance(tensor, torch.Tensor):
            raise ProgramError(f"the model's constant {target!r} is {type(tensor).__name__}, not a tensor")
        tensor = tensor.detach()
        # Tensors without elements all have the same address.
        distinction = target if tensor.numel() == 0 else ""
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), distinction)
        name = stored.setdefault(identity, free_name(target, self._taken))
        self.weights[name] = tensor
        return Ref(name)

    def _learn_axes(self, declaration: InputDeclaration, traced: torch.Tensor) -> None:
        for dim, size in zip(declaration.shape, traced.shape, strict=True):
            if isinstance(dim, str) and isinstance(size, torch.SymInt):
                expression = size.node.expr
                if not isinstance(expression, sympy.Symbol):
                    raise ProgramError(f"torch limits axis {dim!r} to sizes of the form {expression}")
                self._axis_of[expression] = sympy.Symbol(dim, integer=True, positive=True)

    def _cast_at_entry(self, declaration: InputDeclaration, traced: torch.Tensor) -> Argument:
        if declaration.torch_dtype == traced.dtype:
            return Ref(declaration.name)
        dtype = dtype_name(traced.dtype)
        node = Node(
            free_name(f"{declaration.name}_cast", self._taken),
            "aten._to_copy.default",
            (Ref(declaration.name),),
            (("dtype", Constant("dtype", dtype)),),
            declaration.shape,
            dtype,
        )
        self.nodes.append(node)
        self.notes.append(f"input {declaration.name} is cast from {declaration.dtype} to {dtype}")
        return Ref(node.name)

    def graph(self, module: GraphModule, arguments: Sequence[Argument]) -> list[Argument]:
        """Lowers a graph called with ``arguments``; gives what it returns, flat."""
        values: dict[FxNode, Argument] = {}
        given = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                returned = node.args[0]
                flat = returned if isinstance(returned, tuple | list) else (returned,)
                return [self._argument(part, values) for part in flat]
            elif node.op == "call_function":
                self._call(module, node, values)
            elif not isinstance(self._attribute(module, node), GraphModule):
                raise ProgramError(f"the exported graph reads {node.target!r} directly; export it again")
        raise ProgramError("the exported graph returns nothing")

    def _call(self, module: GraphModule, node: FxNode, values: dict[FxNode, Argument]) -> None:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            values[node] = tuple(self._nested(module, node, values))
            return
        op = NAME_OF_FUNCTION.get(id(target), str(target))
        if _ASSERTIONS.match(op) or (not node.users and not isinstance(target, torch._ops.OpOverload)):
            return
        if op == "operator.getitem" and isinstance(container := values[node.args[0]], tuple):  # type: ignore[index]
            values[node] = container[int(node.args[1])]  # type: ignore[arg-type]
            return
        self._check_operation(op, node)
        shape, dtype = self._describe(node.meta.get("val"), node)
        made = Node(
            free_name(node.name, self._taken),
            op,
            tuple(self._argument(part, values) for part in node.args),
            tuple((key, self._argument(part, values)) for key, part in node.kwargs.items()),
            shape,
            dtype,
        )
        self.nodes.append(made)
        values[node] = Ref(made.name)

    def _check_operation(self, op: str, node: FxNode) -> None:
        try:
            resolve(op)
        except ProgramError as error:
            raise ProgramError(f"{error}{_source_line(node)}") from None
        if op in ("aten.dropout.default", "aten.native_dropout.default") and node.args[2] is not False:
            raise ProgramError(
                "the model drops values at random: it was exported in training mode, or calls "
                f"F.dropout(..., training=True); switch it to inference with eval(){_source_line(node)}"
            )
        if is_random(op):
            self.notes.append(f"{node.name} draws random numbers ({op}): answers differ from call to call")
        if op.startswith(_BY_STRIDES):
            base = node.args[0].meta["val"]  # type: ignore[union-attr]
            if not base.is_contiguous() or base.storage_offset() != 0:
                raise ProgramError(
                    f"{op} reads a tensor by its strides after a transpose or slice; write it with reshape, "
                    f"permute or unfold{_source_line(node)}"
                )

    def _nested(self, module: GraphModule, node: FxNode, values: dict[FxNode, Argument]) -> list[Argument]:
        kind = getattr(node.target, "__name__", str(node.target))
        graphs = {
            position: self._attribute(module, part)
            for position, part in enumerate(node.args)
            if isinstance(part, FxNode) and part.op == "get_attr"
        }
        if kind == "cond" and len(graphs) == 2:
            return self._both_branches(node, list(graphs.values()), values)
        is_disabled_autocast = kind == "wrap_with_autocast" and node.args[2] is False
        if (kind == "wrap_with_set_grad_enabled" or is_disabled_autocast) and len(graphs) == 1:
            [(position, graph)] = graphs.items()
            return self.graph(graph, [self._argument(part, values) for part in node.args[position + 1 :]])
        raise ProgramError(
            f"torch's {kind} is not served: write this part with plain torch operations (torch.where for a "
            f"choice, a fixed number of steps for a loop){_source_line(node)}"
        )

    def _both_branches(
        self, node: FxNode, branches: Sequence[GraphModule], values: dict[FxNode, Argument]
    ) -> list[Argument]:
        predicate = self._argument(node.args[0], values)
        operands = self._argument(node.args[3], values)
        if not isinstance(predicate, Ref) or not isinstance(operands, tuple):
            raise ProgramError(f"torch.cond is served with a tensor as condition only{_source_line(node)}")
        if not isinstance(node.args[0].meta["val"], torch.Tensor):  # type: ignore[union-attr]
            raise ProgramError(
                f"torch.cond on a size is not served: narrow the axis' range so that one branch is always "
                f"taken{_source_line(node)}"
            )
        chosen = []
        results = [self.graph(branch, operands) for branch in branches]
        for on_true, on_false, traced in zip(*results, node.meta["val"], strict=True):
            shape, dtype = self._describe(traced, node)
            name = free_name(f"{node.name}_choice", self._taken)
            self.nodes.append(Node(name, "aten.where.self", (predicate, on_true, on_false), (), shape, dtype))
            chosen.append(Ref(name))
        self.notes.append(f"{node.name}: both branches of torch.cond are computed, one is chosen")
        return list(chosen)

    @staticmethod
    def _attribute(module: GraphModule, node: FxNode) -> Any:
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value

    def _argument(self, part: Any, values: Mapping[FxNode, Argument]) -> Argument:
        if isinstance(part, FxNode):
            return values[part]
        if isinstance(part, list | tuple):
            return tuple(self._argument(item, values) for item in part)
        if isinstance(part, torch.device):
            return Constant("device", part.type)
        for kind in ("dtype", "layout", "memory_format"):
            if isinstance(part, getattr(torch, kind)):
                return Constant(kind, str(part).removeprefix("torch."))
        if part is None or isinstance(part, bool | int | float | str):
            return part
        raise ProgramError(
            f"a constant of type {type(part).__name__} ({part}) is not served; use real numbers"
        )

    def _describe(self, traced: Any, node: FxNode) -> tuple[tuple[Dim, ...] | None, str | None]:
        if not isinstance(traced, torch.Tensor):
            return None, None
        return tuple(self._dim(size, node) for size in traced.shape), dtype_name(traced.dtype)

    def _dim(self, size: int | torch.SymInt, node: FxNode) -> Dim:
        if isinstance(size, int):
            return size
        expression = sympy.sympify(size.node.expr)
        if expression.is_number:
            return int(expression)
        unknown = expression.free_symbols - self._axis_of.keys()
        if unknown:
            raise ProgramError(
                f"the size of {node.target}'s result depends on the values in a tensor, which cannot be "
                "served: use torch.where or a mask of fixed size, or move this step out of the model"
                f"{_source_line(node)}"
            )
        text = str(expression.xreplace(self._axis_of))
        axis_names(text)
        return text

    def outputs(
        self, results: Sequence[Argument], names: Sequence[str] | None
    ) -> tuple[tuple[TensorSpec, ...], list[str]]:
        """The program's outputs, named, and notes about results that are not served."""
        specs = self._exported.graph_signature.output_specs
        known = self._known_tensors()
        kept: list[tuple[str, Ref]] = []
        notes: list[str] = []
        user = [
            result for result, spec in zip(results, specs, strict=True) if spec.kind == OutputKind.USER_OUTPUT
        ]
        for name, result in zip(_result_names(self._exported, len(user)), user, strict=True):
            if result is None:
                notes.append(f"result {name} is None and not served")
            elif not isinstance(result, Ref) or result.name not in known:
                raise ProgramError(
                    f"result {name!r} of the model is a number or size ({result}), only tensors are served: "
                    "return torch.as_tensor of it, or leave it out"
                )
            else:
                kept.append((name, result))
        if not kept:
            raise ProgramError("the model returns no tensor, so there is nothing to serve")
        chosen = _chosen_names([name for name, _ in kept], names)
        served = []
        for name, (_, value) in zip(chosen, kept, strict=True):
            shape, dtype = known[value.name]
            served.append(TensorSpec(name, dtype, shape, value.name))
        return tuple(served), notes

    def _known_tensors(self) -> dict[str, tuple[tuple[Dim, ...], str]]:
        known: dict[str, tuple[tuple[Dim, ...], str]] = {
            name: (tuple(weight.shape), dtype_name(weight.dtype)) for name, weight in self.weights.items()
        }
        known |= {d.name: (d.shape, dtype_name(d.torch_dtype)) for d in self._declarations}
        for node in self.nodes:
            if node.shape is not None and node.dtype is not None:
                known[node.name] = (node.shape, node.dtype)
        return known


def _source_line(node: FxNode) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    return f"\n  at {' : '.join(lines[-2:])}" if lines else ""


def _result_names(exported: ExportedProgram, count: int) -> list[str]:
    """A name for every tensor in the model's result, from where it stands there."""
    result = pytree.tree_unflatten(list(range(count)), exported.call_spec.out_spec)
    names = []
    for path, _ in pytree.tree_flatten_with_path(result)[0]:
        parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
        name = "_".join(parts) or "output"
        name = re.sub(r"[^A-Za-z0-9_.\-]", "_", name)
        names.append(f"output_{name}" if name[0].isdigit() else name)
    return names


def _chosen_names(found: Sequence[str], chosen: Sequence[str] | None) -> Sequence[str]:
    names = found if chosen is None else chosen
    if len(names) != len(found):
        raise ProgramError(f"{len(names)} output names given for {len(found)} outputs: {', '.join(found)}")
    wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name)]
    if wrong or len(set(names)) != len(names):
        raise ProgramError(f"output names must be distinct and plain, these are: {', '.join(names)}")
    return names

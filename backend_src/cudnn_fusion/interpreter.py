"""Runs a lowered program with torch, some of its nodes replaced.

It is the request path of the CPU engine and is captured into CUDA graphs: everything that can be decided is
decided in the constructor; `Interpreter.run` only calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_fusion.dims import evaluate_shape
from cudnn_fusion.lowered import (
    Argument,
    Constant,
    Node,
    Program,
    ProgramError,
    Ref,
    node_references,
    references,
)
from cudnn_fusion.operations import resolve

_Values = list[Any]
_Call = Callable[[_Values], Any]


@dataclass(frozen=True)
class Replacement:
    """A group of nodes that something else computes.

    The nodes ``covers`` are not run. At the place of node ``output`` (one of them) ``run`` is called with the
    values named ``inputs`` and gives its value, equal in shape and dtype to what the node would give.
    """

    covers: frozenset[str]
    inputs: tuple[str, ...]
    output: str
    run: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class _Step:
    name: str
    reads: tuple[str, ...]
    bind: Callable[[Mapping[str, int]], _Call]


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of this name, without the ``torch.`` prefix. ProgramError for any other name."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ProgramError(f"{name!r} is not a dtype of torch; expected a name such as float16 or int64")
    return dtype


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _reshape_alias(tensor: torch.Tensor, size: Sequence[int], _stride: Sequence[int]) -> torch.Tensor:
    return tensor.reshape(list(size))


# Traced on row-major tensors; here an operand may be channels-last, where a view of it may not exist.
_BY_LOGICAL_ORDER: dict[str, Callable[..., Any]] = {
    "aten.view.default": torch.ops.aten.reshape.default,
    "aten._unsafe_view.default": torch.ops.aten.reshape.default,
    "aten.view_copy.default": torch.ops.aten.reshape.default,
    "aten._reshape_alias.default": _reshape_alias,
}
_BY_STRIDES = frozenset(
    {
        "aten.as_strided.default",
        "aten.as_strided_copy.default",
        "aten.as_strided_scatter.default",
        "aten.view.dtype",
        "aten.view_copy.dtype",
        "aten.view_as_real.default",
        "aten.view_as_real_copy.default",
        "aten.view_as_complex.default",
        "aten.view_as_complex_copy.default",
        "aten.sym_stride.int",
        "aten.resize.default",
    }
)


def callable_of(op: str) -> Callable[..., Any]:
    """What computes an operation here, whatever layout its operands have. Raises ProgramError."""
    function = resolve(op)
    if op in _BY_LOGICAL_ORDER:
        return _BY_LOGICAL_ORDER[op]
    if op in _BY_STRIDES:
        return lambda tensor, *args, **kwargs: function(_row_major(tensor), *args, **kwargs)
    return function


def _constant(constant: Constant, device: torch.device) -> Any:
    if constant.kind == "device":
        return device
    if constant.kind == "dtype":
        return dtype_named(constant.value)
    expected = {"layout": torch.layout, "memory_format": torch.memory_format}.get(constant.kind)
    value = getattr(torch, constant.value, None) if constant.value.isidentifier() else None
    if expected is None or not isinstance(value, expected):
        raise ProgramError(f"unknown constant {constant.kind} {constant.value!r}")
    return value


class Interpreter:
    """One program, ready to run on one device.

    ``weights`` hold every weight the program reads, on ``device`` (which may be ``meta``), in any memory
    format. ProgramError: an operation is not allowed, a value is read before it exists, a weight is missing,
    or a replacement does not fit. Nothing is run by the constructor.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        replacements: Sequence[Replacement] = (),
    ) -> None:
        self._device = device
        self._input_names = tuple(spec.name for spec in program.inputs)
        for node in program.nodes:
            resolve(node.op)
        steps = self._needed(self._steps(program, replacements), program, replacements)
        available = [*self._input_names, *weights, *(step.name for step in steps)]
        self._slots = {name: slot for slot, name in enumerate(available)}
        self._check_order(program, steps, weights)
        self._initial: _Values = [None] * len(available)
        for name, weight in weights.items():
            self._initial[self._slots[name]] = weight.detach()
        self._outputs = tuple(self._slots[spec.value] for spec in program.outputs)
        self._calls = self._bind(steps, frozenset(weights), frozenset(s.value for s in program.outputs))

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        observe: Callable[[str, object], None] | None = None,
        row_major: bool = True,
    ) -> list[torch.Tensor]:
        """The program's outputs in the order of ``program.outputs``.

        They are contiguous in row-major order; with ``row_major`` False they lie as the last operation left
        them, for a caller that copies them anyway.

        ``inputs`` are on the interpreter's device in the order of ``program.inputs``. ``observe`` is called
        with the name and value of every node that runs. An output may share memory with an input or a weight.
        """
        if len(inputs) != len(self._input_names):
            names = self._input_names
            raise ProgramError(f"{len(inputs)} inputs given, expected {len(names)}: {', '.join(names)}")
        values = self._initial.copy()
        values[: len(inputs)] = inputs
        for name, call, slot, dead in self._calls:
            result = values[slot] = call(values)
            if observe is not None:
                observe(name, result)
            for unused in dead:
                values[unused] = None
        outputs = [values[slot] for slot in self._outputs]
        return [output.contiguous() for output in outputs] if row_major else outputs

    def _steps(self, program: Program, replacements: Sequence[Replacement]) -> list[_Step]:
        by_output = {replacement.output: replacement for replacement in replacements}
        covered: dict[str, Replacement] = {}
        known = {node.name for node in program.nodes}
        for replacement in replacements:
            for name in replacement.covers | {replacement.output}:
                if name in covered or name not in known:
                    problem = "covered twice" if name in covered else "not a node of the program"
                    raise ProgramError(f"replacement for {replacement.output!r}: {name!r} is {problem}")
                covered[name] = replacement
        steps = []
        for node in program.nodes:
            if node.name in by_output:
                steps.append(self._replaced(by_output[node.name]))
            elif node.name not in covered:
                steps.append(self._node(node))
        return steps

    def _replaced(self, replacement: Replacement) -> _Step:
        run = replacement.run
        inputs = tuple(Ref(name) for name in replacement.inputs)
        return _Step(
            replacement.output, replacement.inputs, lambda slots: _bind(run, inputs, {}, slots, self._device)
        )

    def _node(self, node: Node) -> _Step:
        function = callable_of(node.op)
        kwargs = dict(node.kwargs)
        return _Step(
            node.name,
            node_references(node),
            lambda slots: _bind(function, node.args, kwargs, slots, self._device),
        )

    @staticmethod
    def _needed(steps: list[_Step], program: Program, replacements: Sequence[Replacement]) -> list[_Step]:
        needed = {spec.value for spec in program.outputs}
        kept = []
        for step in reversed(steps):
            if step.name in needed:
                kept.append(step)
                needed.update(step.reads)
        hidden = {name for r in replacements for name in r.covers - {r.output}} & needed
        if hidden:
            raise ProgramError(
                f"{', '.join(sorted(hidden))} would not be computed (covered by a replacement) "
                "but is read outside of it"
            )
        return kept[::-1]

    def _check_order(self, program: Program, steps: Sequence[_Step], weights: Mapping[str, object]) -> None:
        known = {*self._input_names, *weights}
        if len(self._slots) != len(self._input_names) + len(weights) + len(steps):
            raise ProgramError("two of the program's inputs, weights and nodes have the same name")
        for step in steps:
            for name in step.reads:
                if name not in known:
                    raise ProgramError(f"node {step.name!r} reads {name!r}, which no earlier node computes")
            known.add(step.name)
        for spec in program.outputs:
            if spec.value not in known:
                raise ProgramError(f"output {spec.name!r} is {spec.value!r}, which no node computes")

    def _bind(
        self, steps: Sequence[_Step], weights: frozenset[str], outputs: frozenset[str]
    ) -> list[tuple[str, _Call, int, tuple[int, ...]]]:
        keep = weights | outputs
        calls = []
        for step in reversed(steps):
            last_read_here = {name for name in step.reads if name not in keep}
            keep |= last_read_here
            dead = tuple(sorted(self._slots[name] for name in last_read_here))
            calls.append((step.name, step.bind(self._slots), self._slots[step.name], dead))
        return calls[::-1]


def _bind(
    function: Callable[..., Any],
    args: tuple[Argument, ...],
    kwargs: Mapping[str, Argument],
    slots: Mapping[str, int],
    device: torch.device,
) -> _Call:
    """A call of ``function`` whose arguments are filled in from the list of values."""
    template = [None if references(arg) else _static(arg, device) for arg in args]
    plain = tuple((i, slots[arg.name]) for i, arg in enumerate(args) if isinstance(arg, Ref))
    nested = tuple(
        (i, _builder(arg, slots, device))
        for i, arg in enumerate(args)
        if not isinstance(arg, Ref) and references(arg)
    )
    static_kwargs = {key: _static(arg, device) for key, arg in kwargs.items() if not references(arg)}
    read_kwargs = tuple((key, _builder(arg, slots, device)) for key, arg in kwargs.items() if references(arg))

    def call_plain(values: _Values) -> Any:
        given = template.copy()
        for position, slot in plain:
            given[position] = values[slot]
        return function(*given, **static_kwargs)

    def call_nested(values: _Values) -> Any:
        given = template.copy()
        for position, slot in plain:
            given[position] = values[slot]
        for position, build in nested:
            given[position] = build(values)
        return function(*given, **static_kwargs, **{key: build(values) for key, build in read_kwargs})

    return call_nested if nested or read_kwargs else call_plain


def _static(argument: Argument, device: torch.device) -> Any:
    if isinstance(argument, Constant):
        return _constant(argument, device)
    if isinstance(argument, tuple):
        return [_static(part, device) for part in argument]
    return argument


def _builder(argument: Argument, slots: Mapping[str, int], device: torch.device) -> _Call:
    if isinstance(argument, Ref):
        slot = slots[argument.name]
        return lambda values: values[slot]
    if isinstance(argument, tuple):
        parts = [_builder(part, slots, device) for part in argument]
        return lambda values: [part(values) for part in parts]
    fixed = _static(argument, device)
    return lambda values: fixed


def recorded_shapes(program: Program, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every input, weight and node for which the program states one, with axes at ``sizes``.

    Takes microseconds, while `infer_shapes` loads torch's compiler the first time, which takes seconds.
    ProgramError: an axis has no size.
    """
    stated = {spec.name: spec.shape for spec in program.inputs}
    stated |= {node.name: node.shape for node in program.nodes if node.shape is not None}
    shapes = {name: tuple(weight.shape) for name, weight in program.weights.items()}
    try:
        return shapes | {name: evaluate_shape(shape, sizes) for name, shape in stated.items()}
    except ValueError as error:
        raise ProgramError(str(error)) from None


def infer_shapes(program: Program, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every input, weight and node result that is one tensor, with axes at ``sizes``.

    Nothing is computed: the program runs on the ``meta`` device. Nodes that no output needs are left out.
    ProgramError: an axis has no size, or the program cannot run at these sizes.
    """
    meta = torch.device("meta")
    weights = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device=meta)
        for name, weight in program.weights.items()
    }
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    try:
        inputs = [
            torch.empty(evaluate_shape(spec.shape, sizes), dtype=dtype_named(spec.dtype), device=meta)
            for spec in program.inputs
        ]
    except ValueError as error:
        raise ProgramError(str(error)) from None
    shapes |= {spec.name: tuple(tensor.shape) for spec, tensor in zip(program.inputs, inputs, strict=True)}

    def observe(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            shapes[name] = tuple(value.shape)

    interpreter = Interpreter(program, weights, meta)
    try:
        interpreter.run(inputs, observe)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ProgramError(f"the program {program.name!r} cannot run at {dict(sizes)}: {error}") from error
    return shapes

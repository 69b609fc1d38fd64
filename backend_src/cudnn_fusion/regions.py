"""Regions: operations that no convolution takes in, of which torch's compiler makes few kernels.

Pooling, norms, concatenation, upsampling and what stands around them are one kernel each in torch, and often
far from what the memory allows. A region is a group of such nodes with one result, all of whose other values
are used inside of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_fusion.interpreter import callable_of
from cudnn_fusion.lowered import Argument, Constant, Node, Program, Ref, encode_node, node_references
from cudnn_fusion.operations import resolve
from cudnn_fusion.plan import canonical_json
from cudnn_fusion.segment import FLOATING, OUTPUT, Operand, Segment

_REDUCING = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d _adaptive_avg_pool2d mean sum amax amin softmax _softmax layer_norm "
    "native_layer_norm group_norm rms_norm batch_norm"
)
_MOVING = (
    "cat upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d pad constant_pad_nd "
    "stack pixel_shuffle pixel_unshuffle roll"
)
_VIEWS = "permute transpose unsqueeze squeeze select slice clone contiguous flatten"

_COMPUTING = frozenset(f"aten.{name}" for name in f"{_REDUCING} {_MOVING}".split())
_ALLOWED = _COMPUTING | frozenset(f"aten.{name}" for name in _VIEWS.split())

MAX_NODES = 48
"""Nodes of one region: a longer one is cut, which costs a read and a write of one value."""


@dataclass(frozen=True)
class Region(Segment):
    """A segment whose meaning is a list of torch operations.

    ``nodes`` are in order and call their values n0, n1, ...; they read operands by name, and the last one
    gives ``y``. ``operations`` is empty. The first input that changes from request to request is ``x``.
    """

    nodes: tuple[Node, ...] = ()

    def signature(self) -> str:
        """sha256 over everything but sizes."""
        description = {
            "nodes": [encode_node(node) for node in self.nodes],
            "operands": [[o.name, o.dtype, o.layout, o.role] for o in self.operands],
        }
        return hashlib.sha256(canonical_json(description).encode()).hexdigest()

    def describe(self) -> str:
        """Short text: ``permute+layer_norm``."""
        return "+".join(node.op.split(".")[1] for node in self.nodes)


def evaluate_region(region: Region, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``y`` in torch, in the operands' dtype: float64 operands give the reference."""
    values: dict[str, Any] = dict(operands)
    for node in region.nodes:
        args = [_filled(argument, values) for argument in node.args]
        kwargs = {key: _filled(argument, values) for key, argument in node.kwargs}
        values[node.name] = callable_of(node.op)(*args, **kwargs)
    result: torch.Tensor = values[region.nodes[-1].name]
    return result


def region_module(region: Region) -> torch.fx.GraphModule:
    """The region as a module for torch's compiler; takes the operands in the order of ``region.inputs``."""
    graph = torch.fx.Graph()
    values: dict[str, Any] = {operand.name: graph.placeholder(operand.name) for operand in region.inputs}
    for node in region.nodes:
        args = tuple(_filled(argument, values) for argument in node.args)
        kwargs = {key: _filled(argument, values) for key, argument in node.kwargs}
        values[node.name] = graph.call_function(callable_of(node.op), args, kwargs)
    graph.output(values[region.nodes[-1].name])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _filled(argument: Argument, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [_filled(part, values) for part in argument]
    return argument


@dataclass(frozen=True)
class FoundRegion:
    """A region's place in a program: operand names with the program's values, and the nodes it stands for."""

    region: Region
    values: tuple[tuple[str, str], ...]
    covers: frozenset[str]


def find_regions(program: Program, taken: frozenset[str]) -> list[FoundRegion]:
    """All regions of the nodes outside of ``taken``, in the program's order."""
    return _Finder(program, taken).run()


def can_be_in_region(program: Program, node: Node) -> bool:
    """Whether an operation may be in a region: on floating tensors alone, with arguments that are fixed."""
    if node.shape is None or node.dtype not in FLOATING or not node.op.startswith("aten."):
        return False
    packet = node.op.rpartition(".")[0]
    if packet not in _ALLOWED and not _is_pointwise(node.op):
        return False
    arguments = [*node.args, *(value for _, value in node.kwargs)]
    return not any(_has_constant(argument) for argument in arguments)


def _is_pointwise(op: str) -> bool:
    function = resolve(op)
    return isinstance(function, torch._ops.OpOverload) and torch.Tag.pointwise in function.tags


def _has_constant(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_has_constant(part) for part in argument)
    return isinstance(argument, Constant)


class _Finder:
    def __init__(self, program: Program, taken: frozenset[str]) -> None:
        self.program = program
        self.nodes = {node.name: node for node in program.nodes}
        self.users: dict[str, set[str]] = {}
        for node in program.nodes:
            for name in node_references(node):
                self.users.setdefault(name, set()).add(node.name)
        self.results = {spec.value for spec in program.outputs}
        self.inputs = {spec.value: spec for spec in program.inputs}
        self.free = {
            node.name
            for node in program.nodes
            if node.name not in taken and can_be_in_region(program, node) and self._reads_tensors(node)
        }

    def run(self) -> list[FoundRegion]:
        found: list[FoundRegion] = []
        for node in reversed(self.program.nodes):
            if node.name not in self.free or not self._ends_one(node):
                continue
            members = self._grow(node)
            self.free -= members
            # Views alone move nothing: torch does them for nothing.
            if any(self._computes(self.nodes[name]) for name in members):
                found.append(self._region(members))
        return found[::-1]

    def _ends_one(self, node: Node) -> bool:
        return node.dtype == self.program_dtype and self._computes(node)

    @property
    def program_dtype(self) -> str:
        return {"fp16": "float16", "bf16": "bfloat16"}.get(self.program.precision, "float32")

    def _computes(self, node: Node) -> bool:
        return node.op.rpartition(".")[0] in _COMPUTING or _is_pointwise(node.op)

    def _reads_tensors(self, node: Node) -> bool:
        """Whether all that the node reads are tensors of the program's type."""
        return all(self._dtype(name) == self.program_dtype for name in node_references(node))

    def _dtype(self, name: str) -> str | None:
        if name in self.nodes:
            node = self.nodes[name]
            return None if node.shape is None else node.dtype
        if name in self.program.weights:
            return str(self.program.weights[name].dtype).removeprefix("torch.")
        return self.inputs[name].dtype if name in self.inputs else None

    def _grow(self, end: Node) -> set[str]:
        """``end`` and all before it that only it and they need."""
        members = {end.name}
        waiting = [end]
        while waiting and len(members) < MAX_NODES:
            for name in node_references(waiting.pop()):
                used_inside = self.users.get(name, set()) <= members and name not in self.results
                if name in self.free and name not in members and used_inside:
                    members.add(name)
                    waiting.append(self.nodes[name])
        return members

    def _region(self, members: set[str]) -> FoundRegion:
        ordered = [node for node in self.program.nodes if node.name in members]
        names: dict[str, str] = {}
        operands: list[Operand] = []
        values: dict[str, str] = {}
        changing = 0
        outside = [r for node in ordered for r in node_references(node) if r not in members]
        for value in dict.fromkeys(outside):
            weight = value in self.program.weights
            name = f"p{len(operands)}" if weight else (f"x{changing}" if changing else "x")
            changing += not weight
            dims = self._rank(value)
            dtype = self._dtype(value) or ""
            operands.append(Operand(name, dtype, layout_of_rank(dims), "weight" if weight else "input"))
            names[value], values[name] = name, value
        nodes: list[Node] = []
        for number, node in enumerate(ordered):
            names[node.name] = f"n{number}"
            nodes.append(_renamed(node, names))
        end = ordered[-1]
        operands.append(Operand(OUTPUT, str(end.dtype), layout_of_rank(len(end.shape or ())), "output"))
        values[OUTPUT] = end.name
        region = Region((), tuple(operands), self.program.precision, tuple(nodes))
        return FoundRegion(region, tuple(values.items()), frozenset(members))

    def _rank(self, value: str) -> int:
        if value in self.nodes:
            return len(self.nodes[value].shape or ())
        if value in self.program.weights:
            return self.program.weights[value].dim()
        return len(self.inputs[value].shape)


def layout_of_rank(rank: int) -> str:
    """Images and volumes lie channels-last throughout, all else row-major."""
    return "channels_last" if rank in (4, 5) else "row_major"


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(names[argument.name])
        if isinstance(argument, tuple):
            return tuple(renamed(part) for part in argument)
        return argument

    return replace(
        node,
        name=names[node.name],
        args=tuple(renamed(argument) for argument in node.args),
        kwargs=tuple((key, renamed(value)) for key, value in node.kwargs),
        shape=None,
    )

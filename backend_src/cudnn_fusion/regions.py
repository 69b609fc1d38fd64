"""Regions: operations that no convolution takes in, of which torch's compiler makes few kernels.

Pooling, norms, concatenation, upsampling and what stands around them are one kernel each in torch, and often
far from what the memory allows. A region is a group of such nodes with one result, all of whose other values
are used inside of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_fusion.interpreter import callable_of
from cudnn_fusion.lowered import (
    PRECISIONS,
    Argument,
    Constant,
    Node,
    Program,
    Ref,
    encode_node,
    node_references,
    renamed,
)
from cudnn_fusion.operations import resolve
from cudnn_fusion.plan import canonical_json
from cudnn_fusion.segment import FLOATING, OUTPUT, Operand, Segment, SegmentSite
from cudnn_fusion.values import Values, packets

_COMPUTING = packets(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d _adaptive_avg_pool2d mean sum amax amin softmax _softmax layer_norm "
    "native_layer_norm group_norm rms_norm batch_norm "
    "cat upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d pad constant_pad_nd "
    "stack pixel_shuffle pixel_unshuffle roll"
)
_VIEWS = packets("permute transpose unsqueeze squeeze select slice clone contiguous flatten")

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
    result: torch.Tensor = _last_value(region, operands, lambda call, args, kwargs: call(*args, **kwargs))
    return result


def region_module(region: Region) -> torch.fx.GraphModule:
    """The region as a module for torch's compiler; takes the operands in the order of ``region.inputs``."""
    graph = torch.fx.Graph()
    operands = {operand.name: graph.placeholder(operand.name) for operand in region.inputs}
    graph.output(_last_value(region, operands, graph.call_function))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _last_value(region: Region, operands: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """What ``call(function, arguments, keyword arguments)`` gives for the last node."""
    values = dict(operands)
    for node in region.nodes:
        args = tuple(_filled(argument, values) for argument in node.args)
        kwargs = {key: _filled(argument, values) for key, argument in node.kwargs}
        values[node.name] = call(callable_of(node.op), args, kwargs)
    return values[region.nodes[-1].name]


def _filled(argument: Argument, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [_filled(part, values) for part in argument]
    return argument


def find_regions(program: Program, values: Values, taken: Collection[str]) -> list[SegmentSite]:
    """All regions of the nodes outside of ``taken``, in the program's order."""
    return _Finder(program, values, taken).run()


def can_be_in_region(node: Node) -> bool:
    """Whether an operation may be in a region: on floating tensors alone, with arguments that are fixed."""
    if node.shape is None or node.dtype not in FLOATING or not node.op.startswith("aten."):
        return False
    if node.op.rpartition(".")[0] not in _VIEWS and not _computes(node):
        return False
    arguments = [*node.args, *(value for _, value in node.kwargs)]
    return not any(_has_constant(argument) for argument in arguments)


def _computes(node: Node) -> bool:
    """Whether more is done than to see a value otherwise, which torch does for nothing."""
    function = resolve(node.op)
    pointwise = isinstance(function, torch._ops.OpOverload) and torch.Tag.pointwise in function.tags
    return pointwise or node.op.rpartition(".")[0] in _COMPUTING


def _has_constant(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_has_constant(part) for part in argument)
    return isinstance(argument, Constant)


class _Finder:
    def __init__(self, program: Program, values: Values, taken: Collection[str]) -> None:
        self.program = program
        self.values = values
        self.dtype = PRECISIONS[program.precision]
        self.free = {
            node.name
            for node in program.nodes
            if node.name not in taken and can_be_in_region(node) and self._reads_tensors(node)
        }

    def run(self) -> list[SegmentSite]:
        found: list[SegmentSite] = []
        for node in reversed(self.program.nodes):
            if node.name in self.free and node.dtype == self.dtype and _computes(node):
                members = self._grow(node)
                self.free -= members
                site = self._site(members)
                # What follows from weights alone has no input to be checked with, and is small.
                if any(operand.role == "input" for operand in site.segment.inputs):
                    found.append(site)
        return found[::-1]

    def _reads_tensors(self, node: Node) -> bool:
        """Whether all that the node reads are tensors of the program's type."""
        return all(
            self.values.dims(name) is not None and self.values.dtype(name) == self.dtype
            for name in node_references(node)
        )

    def _grow(self, end: Node) -> set[str]:
        """``end`` and all before it that only it and they need."""
        members = {end.name}
        waiting = [end]
        while waiting:
            for name in node_references(waiting.pop()):
                if len(members) == MAX_NODES:
                    return members
                users = {user.name for user in self.values.users.get(name, [])}
                used_inside = users <= members and name not in self.values.results
                if name in self.free and name not in members and used_inside:
                    members.add(name)
                    waiting.append(self.values.nodes[name])
        return members

    def _site(self, members: set[str]) -> SegmentSite:
        ordered = [node for node in self.program.nodes if node.name in members]
        names: dict[str, str] = {}
        operands: list[Operand] = []
        changing = 0
        for value in dict.fromkeys(r for node in ordered for r in node_references(node) if r not in members):
            weight = value in self.program.weights
            names[value] = f"p{len(operands)}" if weight else (f"x{changing}" if changing else "x")
            changing += not weight
            operands.append(self._operand(names[value], value, "weight" if weight else "input"))
        values = [(name, value) for value, name in names.items()]
        names |= {node.name: f"n{number}" for number, node in enumerate(ordered)}
        nodes = tuple(replace(renamed(node, names), name=names[node.name], shape=None) for node in ordered)
        end = ordered[-1].name
        operands.append(self._operand(OUTPUT, end, "output"))
        region = Region((), tuple(operands), self.program.precision, nodes)
        return SegmentSite(end, region, (*values, (OUTPUT, end)), frozenset(members))

    def _operand(self, name: str, value: str, role: str) -> Operand:
        return Operand(name, self.dtype, self.values.layout(value), role)

"""Which nodes of a program make one segment, and what is left to torch and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from cudnn_fusion.lowered import Node, Program, Ref, dtype_name, node_references
from cudnn_fusion.passes import conv_arguments
from cudnn_fusion.segment import ACTIVATIONS, Operand, Operation, Segment

FUSIBLE_DTYPES = ("float32", "float16", "bfloat16")

_ACTIVATIONS = {
    "aten.relu.default": "relu",
    "aten.relu6.default": "relu6",
    "aten.silu.default": "silu",
    "aten.sigmoid.default": "sigmoid",
    "aten.tanh.default": "tanh",
}


@dataclass(frozen=True)
class SegmentSite:
    """A segment's place in a program.

    ``values`` maps operand names to the names of the program's values, ``y`` to the one the site produces.
    ``covers`` holds every node that the segment stands for; ``name`` is its convolution's.
    """

    name: str
    segment: Segment
    values: tuple[tuple[str, str], ...]
    covers: frozenset[str]

    def value(self, operand: str) -> str:
        """The program value that ``operand`` is; KeyError if the segment has no such operand."""
        return dict(self.values)[operand]


@dataclass(frozen=True)
class LeftToTorch:
    """A node outside every segment. ``reason`` is a clause that fits behind "because"."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class Partition:
    """Every computing node is in exactly one site or in ``left``."""

    sites: tuple[SegmentSite, ...]
    left: tuple[LeftToTorch, ...]


@dataclass
class _Chain:
    """A segment while it grows."""

    operations: list[Operation]
    operands: list[Operand]
    values: dict[str, str]
    covers: set[str]
    end: Node

    def has(self, *kinds: str) -> bool:
        return any(op.kind in kinds for op in self.operations)

    def take(self, node: Node, operation: Operation, value: str | None, role: str, dtype: str) -> None:
        self.operations.append(operation)
        if operation.operand is not None:
            assert value is not None
            self.operands.append(Operand(operation.operand, dtype, "channels_last", role))
            self.values[operation.operand] = value
        self.covers.add(node.name)
        self.end = node

    def take_per_channel(self, node: Node, kind: str, value: str) -> bool:
        """Takes a scale or shift, of which a chain holds two at most (before and after its activation)."""
        free = [name for name in (kind, f"{kind}2") if name not in self.values]
        if not free:
            return False
        self.take(node, Operation(kind, free[0]), value, "weight", str(node.dtype))
        return True


def partition(program: Program) -> Partition:
    """Groups greedily from each convolution downwards, in the program's order."""
    return _Partitioner(program).run()


class _Partitioner:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = {node.name: node for node in program.nodes}
        self.users: dict[str, list[Node]] = {}
        for node in program.nodes:
            for name in node_references(node):
                self.users.setdefault(name, []).append(node)
        self.results = {spec.value for spec in program.outputs}
        self.covered: set[str] = set()

    def run(self) -> Partition:
        sites: list[SegmentSite] = []
        reasons: dict[str, str] = {}
        for node in self.program.nodes:
            if node.op != "aten.conv2d.default" or node.name in self.covered:
                continue
            refusal = self._refusal(node)
            if refusal:
                reasons[node.name] = refusal
                continue
            site = self._grow(node)
            self.covered |= site.covers
            sites.append(site)
        left = tuple(
            LeftToTorch(node.name, node.op, reasons.get(node.name) or _why_left(node))
            for node in self.program.nodes
            if node.name not in self.covered and _computes(node)
        )
        return Partition(tuple(sites), left)

    def _refusal(self, node: Node) -> str | None:
        x, w, bias, *_ = conv_arguments(node)
        if not (isinstance(x, Ref) and self._dims(x.name) is not None and len(self._dims(x.name) or ()) == 4):
            return "its input is not a batch of images [N, C, H, W]"
        if not (isinstance(w, Ref) and w.name in self.program.weights):
            return "its weight is computed while the model runs"
        if bias is not None and not (isinstance(bias, Ref) and bias.name in self.program.weights):
            return "its bias is computed while the model runs"
        if node.dtype not in FUSIBLE_DTYPES:
            return f"its type {node.dtype} is none of {', '.join(FUSIBLE_DTYPES)}"
        return None

    def _grow(self, conv: Node) -> SegmentSite:
        x, w, bias, stride, padding, dilation, groups = conv_arguments(conv)
        source = cast(Ref, x).name
        before = after = cast("tuple[int, ...]", padding)
        covers = {conv.name}
        pad = self.nodes.get(source)
        zero_pad = _zero_padding(pad) if pad is not None and self._only_user(pad.name) else None
        if pad is not None and zero_pad is not None:
            left, right, top, bottom = zero_pad
            before = (before[0] + top, before[1] + left)
            after = (after[0] + bottom, after[1] + right)
            covers.add(pad.name)
            source = cast(Ref, pad.args[0]).name
        dtype = cast(str, conv.dtype)
        operation = Operation(
            "conv2d",
            "w",
            (
                ("padding_before", before),
                ("padding_after", after),
                ("stride", cast("tuple[int, ...]", stride)),
                ("dilation", cast("tuple[int, ...]", dilation)),
                ("groups", cast(int, groups)),
            ),
        )
        chain = _Chain(
            [operation],
            [Operand("x", dtype, "channels_last", "input"), Operand("w", dtype, "channels_last", "weight")],
            {"x": source, "w": cast(Ref, w).name},
            covers,
            conv,
        )
        if bias is not None:
            chain.take(conv, Operation("bias", "bias"), cast(Ref, bias).name, "weight", dtype)
        while self._extend(chain):
            pass
        chain.operands.append(Operand("y", dtype, "channels_last", "output"))
        chain.values["y"] = chain.end.name
        return SegmentSite(
            name=conv.name,
            segment=Segment(tuple(chain.operations), tuple(chain.operands), self.program.precision),
            values=tuple((o.name, chain.values[o.name]) for o in chain.operands),
            covers=frozenset(chain.covers),
        )

    def _extend(self, chain: _Chain) -> bool:
        """Takes the chain's only user into it if it can."""
        node = self._only_user(chain.end.name)
        if node is None or node.name in self.covered or node.dtype != chain.end.dtype:
            return False
        dtype = cast(str, node.dtype)
        activation = _activation(node)
        if activation is not None and not chain.has(*ACTIVATIONS):
            chain.take(node, activation, None, "", dtype)
            return True
        other = _other_argument(node, chain.end.name)
        if other is None or node.shape != chain.end.shape:
            return False
        per_channel = self._is_per_channel(other, chain.end)
        if node.op == "aten.mul.Tensor" and per_channel:
            return chain.take_per_channel(node, "scale", other)
        if node.op != "aten.add.Tensor" or not _is_plain_add(node):
            return False
        if per_channel:
            return chain.take_per_channel(node, "shift", other)
        same_shape = self._dims(other) == chain.end.shape and self._dtype(other) == dtype
        if same_shape and "residual" not in chain.values:
            chain.take(node, Operation("add", "residual"), other, "input", dtype)
            return True
        return False

    def _only_user(self, name: str) -> Node | None:
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.results else None

    def _is_per_channel(self, name: str, like: Node) -> bool:
        weight = self.program.weights.get(name)
        if weight is None or like.shape is None:
            return False
        dims = tuple(weight.shape)
        return (
            dims in ((1, like.shape[1], 1, 1), (like.shape[1], 1, 1))
            and dtype_name(weight.dtype) == like.dtype
        )

    def _dims(self, name: str) -> tuple[int | str, ...] | None:
        if name in self.nodes:
            return self.nodes[name].shape
        if name in self.program.weights:
            return tuple(self.program.weights[name].shape)
        return next((spec.shape for spec in self.program.inputs if spec.value == name), None)

    def _dtype(self, name: str) -> str | None:
        if name in self.nodes:
            return self.nodes[name].dtype
        if name in self.program.weights:
            return dtype_name(self.program.weights[name].dtype)
        return next((spec.dtype for spec in self.program.inputs if spec.value == name), None)


def _zero_padding(node: Node | None) -> tuple[int, int, int, int] | None:
    """(left, right, top, bottom) of a node that pads H and W with zeros and nothing else."""
    if node is None or node.op not in ("aten.pad.default", "aten.constant_pad_nd.default"):
        return None
    amounts = node.args[1]
    if not isinstance(amounts, tuple) or not all(isinstance(a, int) and a >= 0 for a in amounts):
        return None
    rest = list(node.args[2:]) + [value for _, value in node.kwargs]
    if any(value not in (None, "constant", 0, 0.0) for value in rest):
        return None
    numbers = cast("tuple[int, ...]", amounts)
    full = (*numbers, *(0,) * (4 - len(numbers)))
    if len(numbers) > 4 and any(numbers[4:]):
        return None
    return full[0], full[1], full[2], full[3]


def _activation(node: Node) -> Operation | None:
    if node.op in _ACTIVATIONS:
        return Operation(_ACTIVATIONS[node.op])
    if node.op == "aten.hardtanh.default":
        low, high = (*node.args[1:], *(value for _, value in node.kwargs), -1.0, 1.0)[:2]
        return Operation("relu6") if (low, high) == (0, 6) else None
    if node.op == "aten.leaky_relu.default":
        slope = (*node.args[1:], *(value for _, value in node.kwargs), 0.01)[0]
        return Operation("leaky_relu", None, (("negative_slope", float(cast(float, slope))),))
    return None


def _other_argument(node: Node, name: str) -> str | None:
    """The second tensor of a two-tensor operation that takes ``name`` once."""
    names = node_references(node)
    if len(names) != 2 or names.count(name) != 1 or not all(isinstance(a, Ref) for a in node.args[:2]):
        return None
    return names[1 - names.index(name)]


def _is_plain_add(node: Node) -> bool:
    return dict(node.kwargs).get("alpha", 1) == 1 and len(node.args) == 2


def _computes(node: Node) -> bool:
    """Whether the node gives tensors, one or several, and not sizes."""
    return node.shape is not None or (node.op.startswith("aten.") and not node.op.startswith("aten.sym_"))


def _why_left(node: Node) -> str:
    if node.op == "aten.conv2d.default":
        return "its pattern is not fusible"
    return "no fusible convolution directly before it takes it in"

"""Which nodes of a program make one segment, and what is left to torch and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from cudnn_fusion.convolutions import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    conv_arguments,
    output_padding,
)
from cudnn_fusion.joined_sums import join_sums
from cudnn_fusion.lowered import Argument, Node, Program, Ref, dtype_name, node_references, references
from cudnn_fusion.regions import can_be_in_region, find_regions
from cudnn_fusion.segment import (
    ACTIVATIONS,
    CHANNELS_LAST,
    FLOATING,
    MAX_STEM_CHANNELS,
    PADDED,
    POOL,
    TRANSPOSED,
    Attribute,
    Dims,
    Operand,
    Operation,
    Segment,
    SegmentSite,
    per_channel_dims,
)
from cudnn_fusion.values import Values, is_plain_add

_ACTIVATIONS = {
    "aten.relu.default": "relu",
    "aten.relu6.default": "relu6",
    "aten.silu.default": "silu",
    "aten.sigmoid.default": "sigmoid",
    "aten.tanh.default": "tanh",
    "aten.hardswish.default": "hardswish",
    "aten.hardsigmoid.default": "hardsigmoid",
}
_RANKS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS
_BATCHES = {1: "sequences [N, C, L]", 2: "images [N, C, H, W]", 3: "volumes [N, C, D, H, W]"}


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


def for_device(program: Program, kind: str) -> tuple[Program, Partition]:
    """The program as it runs on a kind of device, ``cuda`` or ``cpu``, and its segments there."""
    if kind != "cuda":
        return program, partition(program)
    joined = join_sums(program)
    return joined, partition(joined, with_regions=True)


def partition(program: Program, with_regions: bool = False) -> Partition:
    """Groups greedily from each convolution downwards, in the program's order; then, where a device's engines
    serve regions, what is left."""
    return _Partitioner(program, with_regions).run()


class _Partitioner:
    def __init__(self, program: Program, with_regions: bool) -> None:
        self.program = program
        self.with_regions = with_regions
        self.values = Values(program)
        self.covered: set[str] = set()

    def run(self) -> Partition:
        sites: list[SegmentSite] = []
        reasons: dict[str, str] = {}
        for node in self.program.nodes:
            if node.op not in _RANKS or node.name in self.covered:
                continue
            refusal = self._refusal(node)
            if refusal:
                reasons[node.name] = refusal
                continue
            site = self._grow(node)
            self.covered |= site.covers
            sites.append(site)
        if self.with_regions:
            regions = find_regions(self.program, self.values, self.covered)
            sites += regions
            self.covered.update(*(region.covers for region in regions))
        left = tuple(
            LeftToTorch(node.name, node.op, reasons.get(node.name) or _why_left(node))
            for node in self.program.nodes
            if node.name not in self.covered and _computes(node)
        )
        return Partition(tuple(sites), left)

    def _refusal(self, node: Node) -> str | None:
        x, w, bias, *_ = conv_arguments(node)
        rank = _RANKS[node.op]
        if not (isinstance(x, Ref) and len(self.values.dims(x.name) or ()) == rank + 2):
            return f"its input is not a batch of {_BATCHES[rank]}"
        if not (isinstance(w, Ref) and w.name in self.program.weights):
            return "its weight is computed while the model runs"
        if bias is not None and not (isinstance(bias, Ref) and bias.name in self.program.weights):
            return "its bias is computed while the model runs"
        if node.dtype not in FLOATING:
            return f"its type {node.dtype} is none of {', '.join(FLOATING)}"
        transposed = node.op in TRANSPOSED_CONVOLUTIONS
        if references(conv_arguments(node)[3:]) or (transposed and references(output_padding(node))):
            return "its stride or padding follows from a request's sizes"
        return _transposed_refusal(node) if transposed else None

    def _grow(self, conv: Node) -> SegmentSite:
        x, w, bias, *_ = conv_arguments(conv)
        source = cast(Ref, x).name
        before = after = cast(Dims, conv_arguments(conv)[4])
        covers = {conv.name}
        pad = self.values.nodes.get(source)
        sides = None
        if pad is not None and conv.op in CONVOLUTIONS and self.values.only_user(pad.name):
            sides = _zero_padding(pad, _RANKS[conv.op])
        if pad is not None and sides is not None:
            before = tuple(a + b for a, b in zip(before, sides[0], strict=True))
            after = tuple(a + b for a, b in zip(after, sides[1], strict=True))
            covers.add(pad.name)
            source = cast(Ref, pad.args[0]).name
        dtype = cast(str, conv.dtype)
        layout = PADDED if self._gains_by_padding(conv, source) else CHANNELS_LAST
        chain = _Chain(
            [_convolution(conv, before, after)],
            [Operand("x", dtype, layout, "input"), Operand("w", dtype, layout, "weight")],
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

    def _gains_by_padding(self, conv: Node, source: str) -> bool:
        """Whether the convolution reads an image of three channels that comes with the request.

        Kernels for three channels load one element at a time, those for four load them together; and the
        request's image is copied into the executor's buffer anyway.
        """
        return (
            conv.op == "aten.conv2d.default"
            and conv.dtype in ("float16", "bfloat16")
            and any(spec.value == source and spec.shape[1] == 3 for spec in self.program.inputs)
            and conv_arguments(conv)[6] == 1
        )

    def _extend(self, chain: _Chain) -> bool:
        """Takes the chain's only user into it if it can."""
        node = self.values.only_user(chain.end.name)
        if node is None or node.name in self.covered or node.dtype != chain.end.dtype:
            return False
        if chain.has(POOL):
            return False
        pool = self._pool_behind_stem(node, chain)
        if pool is not None:
            chain.take(node, pool, None, "", str(node.dtype))
            return True
        dtype = cast(str, node.dtype)
        activation = _activation(node)
        if activation is not None and not chain.has(*ACTIVATIONS):
            chain.take(node, activation, None, "", dtype)
            return True
        other = _other_argument(node, chain.end.name)
        if other is None or node.shape != chain.end.shape:
            return False
        per_channel = self._is_per_channel(other, chain.end)
        if per_channel and chain.has(*ACTIVATIONS) and self._leads_to_region(node):
            return False
        if node.op == "aten.mul.Tensor" and per_channel:
            return chain.take_per_channel(node, "scale", other)
        if not is_plain_add(node):
            return False
        if per_channel:
            return chain.take_per_channel(node, "shift", other)
        same_shape = self.values.dims(other) == chain.end.shape and self.values.dtype(other) == dtype
        if same_shape and "residual" not in chain.values:
            chain.take(node, Operation("add", "residual"), other, "input", dtype)
            return True
        return False

    def _pool_behind_stem(self, node: Node, chain: _Chain) -> Operation | None:
        """A max-pool that the engine for first convolutions does in its kernel, whose output is then never
        written: half precision on a GPU, see `cudnn_fusion.engines.stem`."""
        conv = chain.operations[0]
        channels = self.program.weights[chain.values["w"]].shape[1]
        few = conv.kind == "conv2d" and conv.attribute("groups") == 1 and channels <= MAX_STEM_CHANNELS
        if not (self.with_regions and few and node.op == "aten.max_pool2d.default" and not chain.has("add")):
            return None
        return _max_pool(node) if node.dtype in ("float16", "bfloat16") else None

    def _leads_to_region(self, node: Node) -> bool:
        """Whether scales and shifts from ``node`` on end in an operation of a region.

        That region's kernel does them on the way; a convolution with more behind its activation has few and
        slow plans.
        """
        following: Node | None = node
        while following is not None and following.op in ("aten.mul.Tensor", "aten.add.Tensor"):
            following = self.values.only_user(following.name)
        return self.with_regions and following is not None and can_be_in_region(following)

    def _is_per_channel(self, name: str, like: Node) -> bool:
        weight = self.program.weights.get(name)
        if weight is None or like.shape is None:
            return False
        channels = like.shape[1]
        if not isinstance(channels, int):
            return False
        dims = per_channel_dims(channels, len(like.shape))
        return tuple(weight.shape) in (dims, dims[1:]) and dtype_name(weight.dtype) == like.dtype


def _convolution(conv: Node, before: Dims, after: Dims) -> Operation:
    _, _, _, stride, _, dilation, groups = conv_arguments(conv)
    attributes: list[tuple[str, Attribute]] = [
        ("padding_before", before),
        ("padding_after", after),
        ("stride", cast(Dims, stride)),
        ("dilation", cast(Dims, dilation)),
        ("groups", cast(int, groups)),
    ]
    kind = conv.op.split(".")[1]
    if kind in TRANSPOSED:
        attributes.append(("output_padding", cast(Dims, output_padding(conv))))
    return Operation(kind, "w", tuple(attributes))


def _transposed_refusal(node: Node) -> str | None:
    if node.op.split(".")[1] not in TRANSPOSED:
        return "cuDNN has no fused plan for a transposed convolution along three axes"
    stride, more = conv_arguments(node)[3], output_padding(node)
    if any(m >= s for m, s in zip(cast(Dims, more), cast(Dims, stride), strict=True)):
        return "no convolution is its transpose: its output padding is not smaller than its stride"
    return None


def _zero_padding(node: Node, rank: int) -> tuple[Dims, Dims] | None:
    """Zeros before and after each of ``rank`` axes, of a node that pads with those and nothing else."""
    if node.op not in ("aten.pad.default", "aten.constant_pad_nd.default"):
        return None
    amounts = node.args[1]
    if not isinstance(amounts, tuple) or not all(isinstance(a, int) and a >= 0 for a in amounts):
        return None
    rest = list(node.args[2:]) + [value for _, value in node.kwargs]
    if any(value not in (None, "constant", 0, 0.0) for value in rest):
        return None
    numbers = cast(Dims, amounts)
    full = (*numbers, *(0,) * (2 * rank - len(numbers)))
    if any(full[2 * rank :]):
        return None
    # Amounts begin with the last axis.
    return full[: 2 * rank : 2][::-1], full[1 : 2 * rank : 2][::-1]


def _activation(node: Node) -> Operation | None:
    if node.op in _ACTIVATIONS:
        return Operation(_ACTIVATIONS[node.op])
    if node.op == "aten.hardtanh.default":
        low, high = _settings(node, min_val=-1.0, max_val=1.0)
        return Operation("relu6") if (low, high) == (0, 6) else None
    if node.op == "aten.leaky_relu.default":
        (slope,) = _settings(node, negative_slope=0.01)
        return Operation("leaky_relu", None, (("negative_slope", float(cast(float, slope))),))
    if node.op == "aten.elu.default":
        alpha, scale, input_scale = _settings(node, alpha=1.0, scale=1.0, input_scale=1.0)
        plain = (scale, input_scale) == (1, 1)
        return Operation("elu", None, (("alpha", float(cast(float, alpha))),)) if plain else None
    if node.op == "aten.gelu.default":
        (approximate,) = _settings(node, approximate="none")
        return Operation("gelu_tanh" if approximate == "tanh" else "gelu")
    return None


def _max_pool(node: Node) -> Operation | None:
    """The operation of a max-pool whose windows leave out nothing; None for another."""
    kernel, stride, padding, dilation, ceil_mode = (
        _pair(value) if isinstance(value, (int, tuple)) and not isinstance(value, bool) else value
        for value in _settings(node, kernel_size=None, stride=(), padding=0, dilation=1, ceil_mode=False)
    )
    if dilation != (1, 1) or ceil_mode or references((kernel, stride, padding)):
        return None
    sizes = (("kernel", kernel), ("stride", stride or kernel), ("padding", padding))
    return Operation(POOL, None, cast(tuple[tuple[str, Attribute], ...], sizes))


def _pair(sizes: Argument) -> Argument:
    """Two sizes, of one that holds for both axes or of two."""
    both = sizes if isinstance(sizes, tuple) else (sizes,)
    return both * 2 if len(both) == 1 else both


def _settings(node: Node, **defaults: Argument) -> tuple[Argument, ...]:
    """An activation's arguments behind its input, in the order of ``defaults``."""
    given = dict(zip(defaults, node.args[1:], strict=False)) | dict(node.kwargs)
    return tuple(given.get(name, default) for name, default in defaults.items())


def _other_argument(node: Node, name: str) -> str | None:
    """The second tensor of a two-tensor operation that takes ``name`` once."""
    names = node_references(node)
    if len(names) != 2 or names.count(name) != 1 or not all(isinstance(a, Ref) for a in node.args[:2]):
        return None
    return names[1 - names.index(name)]


def _computes(node: Node) -> bool:
    """Whether the node gives tensors, one or several, and not sizes."""
    return node.shape is not None or (node.op.startswith("aten.") and not node.op.startswith("aten.sym_"))


def _why_left(node: Node) -> str:
    if node.op in _RANKS:
        return "its pattern is not fusible"
    return "no fusible convolution directly before it takes it in"

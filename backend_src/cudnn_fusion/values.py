"""What a program says of its values: what makes them, who reads them, their dims and types."""

from __future__ import annotations

from cudnn_fusion.lowered import Dim, Node, Program, dtype_name, node_references
from cudnn_fusion.segment import CHANNELS_LAST, ROW_MAJOR


def packets(names: str) -> frozenset[str]:
    """ATen operations by their names without overloads, separated by spaces."""
    return frozenset(f"aten.{name}" for name in names.split())


_ROW_MAJOR = packets(
    "linear matmul mm bmm addmm baddbmm layer_norm native_layer_norm rms_norm view reshape _unsafe_view "
    "unflatten embedding scaled_dot_product_attention transpose"
)
"""Operations whose results of four or five axes are row-major."""


def is_plain_add(node: Node) -> bool:
    """Whether it adds its two arguments as they are."""
    plain = len(node.args) == 2 and dict(node.kwargs).get("alpha", 1) == 1
    return node.op == "aten.add.Tensor" and plain


class Values:
    """Look-ups by a value's name, for those that group a program's nodes."""

    def __init__(self, program: Program) -> None:
        self.nodes = {node.name: node for node in program.nodes}
        self.users: dict[str, list[Node]] = {}
        """Readers in the program's order; one that reads a value twice is there twice."""
        for node in program.nodes:
            for name in node_references(node):
                self.users.setdefault(name, []).append(node)
        self.results = {spec.value for spec in program.outputs}
        self._weights = program.weights
        self._inputs = {spec.value: spec for spec in program.inputs}
        self._layouts: dict[str, str] = {}
        for node in program.nodes:
            self._layouts[node.name] = self._made_layout(node)

    def only_user(self, name: str) -> Node | None:
        """The one node that reads a value that nothing else needs."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.results else None

    def layout(self, name: str) -> str:
        """How a value lies in memory where nothing rearranges it: convolutions give images and volumes
        channels-last, linear layers and reshapes give row-major values, others what they are given."""
        rank = len(self.dims(name) or ())
        return self._layouts.get(name, CHANNELS_LAST if rank in (4, 5) else ROW_MAJOR)

    def _made_layout(self, node: Node) -> str:
        rank = len(node.shape or ())
        packet = node.op.rpartition(".")[0]
        if rank not in (4, 5) or packet in _ROW_MAJOR:
            return ROW_MAJOR
        sources = [name for name in node_references(node) if name not in self._weights]
        source = next((name for name in sources if len(self.dims(name) or ()) == rank), None)
        if source is None or "conv" in packet:
            return CHANNELS_LAST
        if packet == "aten.permute":
            order = tuple(int(axis) % rank for axis in node.args[1])  # type: ignore[union-attr, arg-type]
            last = (0, *range(2, rank), 1)
            if self.layout(source) == CHANNELS_LAST:
                return CHANNELS_LAST if order == tuple(range(rank)) else ROW_MAJOR
            return CHANNELS_LAST if tuple(order[axis] for axis in last) == tuple(range(rank)) else ROW_MAJOR
        return self.layout(source)

    def dims(self, name: str) -> tuple[Dim, ...] | None:
        """None for what is not one tensor."""
        if name in self._weights:
            return tuple(self._weights[name].shape)
        found = self.nodes.get(name) or self._inputs.get(name)
        return None if found is None else found.shape

    def dtype(self, name: str) -> str | None:
        """None for what is not one tensor."""
        if name in self._weights:
            return dtype_name(self._weights[name].dtype)
        found = self.nodes.get(name) or self._inputs.get(name)
        return None if found is None else found.dtype

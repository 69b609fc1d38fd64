"""What a program says of its values: what makes them, who reads them, their dims and types."""

from __future__ import annotations

from cudnn_fusion.lowered import Dim, Node, Program, dtype_name, node_references


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

    def only_user(self, name: str) -> Node | None:
        """The one node that reads a value that nothing else needs."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.results else None

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

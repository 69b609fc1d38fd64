"""Whether an operation can make a row depend on the others: read off the program, without running it.

A run with some inputs cannot show that rows never influence each other (a threshold on the batch's maximum
acts only on inputs that reach it). So every operation must be one that is known to keep rows apart; when in
doubt the answer is that it does not. Nothing is lost then but joining and padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from cudnn_fusion.dims import axis_names
from cudnn_fusion.lowered import Argument, Dim, Node, Program, Ref, node_references

# They place dimensions anew and read no element of another row; their result's shape tells where rows are.
_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "unsqueeze", "squeeze", "flatten"}
    | {"unflatten", "alias", "clone", "contiguous", "t", "numpy_T", "movedim", "swapaxes"}
)

# Sizes may follow the number of rows here: shapes of views, and of tensors of one repeated value.
_SIZED = _VIEWS | {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "empty", "sym_size"}

# They may reach into other rows, or depend on a row's place, without naming the dimension.
_MOVES_ROWS = {"rot90", "take", "put", "index_put", "cdist", "tril", "triu", "kron"}


def row_mixing(program: Program, axis: str) -> str | None:
    """The first operation that may let rows along ``axis`` influence each other; None without one."""
    return _Check(program, axis).run()


class _Check:
    def __init__(self, program: Program, axis: str) -> None:
        self.program = program
        self.axis = axis
        self.shapes: dict[str, tuple[Dim, ...]] = {s.value: s.shape for s in program.inputs}
        self.shapes |= {node.name: node.shape for node in program.nodes if node.shape is not None}
        # Values without a shape: numbers that follow the number of rows, and results of several tensors.
        self.counts: set[str] = set()
        self.several: set[str] = set()

    def run(self) -> str | None:
        for node in self.program.nodes:
            problem = self._problem(node)
            if problem:
                return f"{node.op} {problem}"
        return None

    def _problem(self, node: Node) -> str | None:
        kind = node.op.split(".")[1]
        names = node_references(node)
        if kind == "sym_size" or node.op.startswith(("operator.", "sym.", "math.")):
            if kind == "getitem" and any(name in self.several for name in names):
                return self._lost_rows(node)
            if self._follows_rows(node, names):
                self.counts.add(node.name)
            return None
        if any(name in self.counts for name in names) and kind not in _SIZED:
            return "computes with the number of rows"
        with_rows = [name for name in names if self._row_dims(name) or name in self.several]
        if not with_rows:
            return None
        if node.shape is None:
            self.several.add(node.name)
            return self._over_rows(node, kind)
        return self._lost_rows(node) or (None if kind in _VIEWS else self._over_rows(node, kind))

    def _follows_rows(self, node: Node, names: Iterable[str]) -> bool:
        if any(name in self.counts for name in names):
            return True
        source, *rest = node.args
        dim = rest[0] if rest else None
        return isinstance(source, Ref) and isinstance(dim, int) and dim in self._row_dims(source.name)

    def _lost_rows(self, node: Node) -> str | None:
        """A result in which rows are no longer one dimension of their own, or a multiple of it."""
        dims = [dim for dim in node.shape or () if self.axis in axis_names(dim)]
        if not dims:
            return "reduces over rows"
        if len(dims) > 1 or not _is_multiple(dims[0], self.axis):
            return "joins rows with each other or with something else"
        return None

    def _over_rows(self, node: Node, kind: str) -> str | None:
        """Whether an argument that names dimensions names that of the rows."""
        first = node.args[0] if node.args else None
        if kind in _MOVES_ROWS or (kind == "index" and self._indexes_rows(node)):
            return "may read other rows"
        names: list[Ref] = [item for item in _flat(first) if isinstance(item, Ref)]
        rows = [dim for ref in names for dim in self._row_dims(ref.name)]
        rank = max((len(self.shapes.get(ref.name, ())) for ref in names), default=0)
        given = _dims(node, rank)
        if any(dim in rows for dim in given) or (kind == "roll" and not given):
            return "works along the rows"
        return None

    def _indexes_rows(self, node: Node) -> bool:
        source, *rest = node.args
        rows = self._row_dims(source.name) if isinstance(source, Ref) else []
        indices = rest[0] if rest else None
        given = indices if isinstance(indices, tuple) else (indices,)
        return any(index is not None and position in rows for position, index in enumerate(given))

    def _row_dims(self, name: str) -> list[int]:
        return [i for i, dim in enumerate(self.shapes.get(name, ())) if self.axis in axis_names(dim)]


def _is_multiple(dim: Dim, axis: str) -> bool:
    """``batch``, ``4*batch``, ``batch*4``, and products with other axes: rows one after the other."""
    return (
        isinstance(dim, str) and re.search(r"[+\-/%]|//", dim) is None and len(re.findall(r"\w+", dim)) >= 1
    )


def _dims(node: Node, rank: int) -> list[int]:
    """Dimensions that the operation's arguments called ``dim``, ``dims`` or ``axis`` name, counted from 0."""
    namespace, name, overload = node.op.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
    named: Mapping[str, Argument] = dict(node.kwargs)
    found: list[int] = []
    for position, argument in enumerate(schema.arguments):
        if argument.name not in ("dim", "dims", "axis", "dim0", "dim1", "dimension"):
            continue
        given = node.args[position] if position < len(node.args) else named.get(argument.name)
        if given is None and position >= len(node.args) and argument.name not in named:
            given = argument.default_value
        found += [item % rank for item in _flat(given) if type(item) is int and rank]
    return found


def _flat(argument: object) -> list[object]:
    if isinstance(argument, tuple | list):
        return [inner for item in argument for inner in _flat(item)]
    return [] if argument is None else [argument]

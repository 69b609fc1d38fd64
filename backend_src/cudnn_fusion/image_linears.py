"""Linear layers over the channels of images, as the 1x1 convolutions that they are.

A model that keeps images as [N, H, W, C] between permutes (ConvNeXt, Swin) has the memory of a channels-last
[N, C, H, W] all along. With its linear layers as convolutions, and the permutes moved behind operations to
which they do not matter, permutes cancel, and activations, scales and residuals are in reach of the epilogue.
"""

from __future__ import annotations

from dataclasses import replace

from cudnn_fusion.lowered import (
    Argument,
    Dim,
    Node,
    Program,
    Ref,
    all_names,
    dtype_name,
    free_name,
    rebuilt,
    renamed,
)
from cudnn_fusion.values import packets

TO_IMAGE = (0, 3, 1, 2)
FROM_IMAGE = (0, 2, 3, 1)
_LINEAR = "aten.linear.default"
_PERMUTE = "aten.permute.default"
_CONV = "aten.conv2d.default"
_POINTWISE = packets(
    "relu gelu silu sigmoid tanh hardswish hardsigmoid elu leaky_relu relu6 hardtanh add mul sub"
)


def linears_as_convolutions(program: Program) -> Program:
    """Every linear layer on [N, H, W, C] as a permuted 1x1 convolution; permutes that undo each other go."""
    rewriting = _Rewriting(program)
    if not any(rewriting.is_image_linear(node) for node in program.nodes):
        return program
    for node in program.nodes:
        rewriting.take(node)
    return rewriting.result()


class _Rewriting:
    """The new nodes. ``images`` maps values that are an image seen as [N, H, W, C] to that image, ``same``
    values that are no more to those that they are."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.weights = dict(program.weights)
        self.nodes: list[Node] = []
        self.images: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.reshaped: dict[tuple[str, tuple[Dim, ...]], str] = {}
        self.shapes: dict[str, tuple[Dim, ...] | None] = {spec.value: spec.shape for spec in program.inputs}
        self.shapes |= {name: tuple(weight.shape) for name, weight in program.weights.items()}
        self.shapes |= {node.name: node.shape for node in program.nodes}
        self.taken = all_names(program)
        self.linears = 0

    def is_image_linear(self, node: Node) -> bool:
        """Whether it is a linear layer by weights on [N, H, W, C]."""
        if node.op != _LINEAR or node.kwargs or len(node.shape or ()) != 4:
            return False
        x, *weights = node.args
        dtypes = {
            dtype_name(self.weights[w.name].dtype)
            for w in weights
            if isinstance(w, Ref) and w.name in self.weights
        }
        known = all(w is None or (isinstance(w, Ref) and w.name in self.weights) for w in weights)
        return isinstance(x, Ref) and known and dtypes == {node.dtype}

    def take(self, node: Node) -> None:
        """Adds the node, or what it becomes."""
        node = renamed(node, self.same)
        if self.is_image_linear(node):
            self._take_linear(node)
        elif node.op == _PERMUTE:
            self._take_permute(node)
        elif node.op.rpartition(".")[0] in _POINTWISE and len(node.shape or ()) == 4:
            self._take_pointwise(node)
        else:
            self.nodes.append(node)

    def result(self) -> Program:
        """The program of the new nodes; what nothing needs any more is still in it."""
        notes = [f"linear layers on images as 1x1 convolutions: {self.linears}"]
        return rebuilt(replace(self.program, weights=self.weights), self.nodes, self.same, notes)

    def _take_linear(self, node: Node) -> None:
        x, weight, *bias = node.args
        assert isinstance(x, Ref)
        assert isinstance(weight, Ref)
        image = self.images.get(x.name)
        if image is None:
            image = free_name(f"{node.name}_x", self.taken)
            self._add(Node(image, _PERMUTE, (x, TO_IMAGE), (), self._permuted(x.name, TO_IMAGE), node.dtype))
        kernel = self._reshaped(weight.name, (*self.weights[weight.name].shape, 1, 1))
        ones, zeros = (1, 1), (0, 0)
        args: tuple[Argument, ...] = (Ref(image), Ref(kernel), *(bias or (None,)), ones, zeros, ones, 1)
        self._add_image(node, replace(node, op=_CONV, args=args))
        self.linears += 1

    def _take_permute(self, node: Node) -> None:
        source = node.args[0]
        if isinstance(source, Ref) and len(node.shape or ()) == 4 and isinstance(node.args[1], tuple):
            order = tuple(int(axis) % 4 for axis in node.args[1])  # type: ignore[arg-type]
            if order == FROM_IMAGE:
                self.images[node.name] = source.name
            elif order == TO_IMAGE and source.name in self.images:
                self.same[node.name] = self.images[source.name]
                return
        self.nodes.append(node)

    def _take_pointwise(self, node: Node) -> None:
        args = [self._as_image(argument) for argument in node.args]
        if None in args or not any(isinstance(a, Ref) and a.name in self.images for a in node.args):
            self.nodes.append(node)
            return
        found: list[Argument] = [a[0] for a in args if a is not None]
        self._add_image(node, replace(node, args=tuple(found)))

    def _as_image(self, argument: Argument) -> tuple[Argument] | None:
        """An argument for the same operation on images; None where it has none."""
        if not isinstance(argument, Ref):
            return (argument,)
        if argument.name in self.images:
            return (Ref(self.images[argument.name]),)
        shape = self.shapes.get(argument.name)
        if argument.name in self.weights and shape is not None and all(size == 1 for size in shape[:-1]):
            return (Ref(self._reshaped(argument.name, (*shape[-1:], 1, 1))),)
        return None

    def _add_image(self, node: Node, image: Node) -> None:
        """Adds ``image``, which computes on images what ``node`` does, and ``node`` as a view of that."""
        name = free_name(f"{node.name}_image", self.taken)
        self._add(replace(image, name=name, shape=self._permuted(node.name, TO_IMAGE)))
        self.images[node.name] = name
        self.nodes.append(replace(node, op=_PERMUTE, args=(Ref(name), FROM_IMAGE), kwargs=()))

    def _add(self, node: Node) -> None:
        self.shapes[node.name] = node.shape
        self.nodes.append(node)

    def _permuted(self, name: str, order: tuple[int, ...]) -> tuple[Dim, ...] | None:
        shape = self.shapes[name]
        return None if shape is None else tuple(shape[axis] for axis in order)

    def _reshaped(self, name: str, dims: tuple[Dim, ...]) -> str:
        """A weight with other dims, under a name of its own; the same one whenever it is asked for."""
        if (name, dims) not in self.reshaped:
            reshaped = self.reshaped[name, dims] = free_name(f"{name}_image", self.taken)
            self.weights[reshaped] = self.weights[name].reshape([int(size) for size in dims])
            self.shapes[reshaped] = dims
        return self.reshaped[name, dims]

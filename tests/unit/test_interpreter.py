"""Running lowered programs: layouts, replacements, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from torch import nn

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.interpreter import Interpreter, Replacement, infer_shapes
from cudnn_fusion.lowered import Argument, Axis, Constant, Node, Program, ProgramError, Ref, TensorSpec
from cudnn_fusion.operations import resolve
from cudnn_fusion.program import export_program

CPU = torch.device("cpu")


def _exported(model: nn.Module, declared: str) -> Program:
    return export_program(model, [InputDeclaration.parse(declared)], "fp32")[1]


def _program(*nodes: Node, output: str | None = None) -> Program:
    x = TensorSpec("x", "float32", ("n", 3), "x")
    value = output or nodes[-1].name
    out = TensorSpec("out", "float32", ("n", 3), value)
    return Program("p", "fp32", (x,), (out,), (Axis("n", 1, 8),), None, nodes, {})


def _node(name: str, op: str, *args: Argument, **kwargs: Argument) -> Node:
    return Node(name, op, args, tuple(kwargs.items()))


def _channels_last(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: weight.contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight
        for name, weight in weights.items()
    }


@pytest.mark.parametrize(
    ("model", "declared"),
    [
        (models.Reordered, "x:FP32[batch=1..8,4,6,6]"),
        (models.ConvNet, "x:FP32[batch=1..8,3,14,14]"),
        (models.Residual, "x:FP32[batch=1..8,8,6,6]"),
    ],
)
def test_channels_last_weights_and_activations_give_torchs_answers(
    model: type[nn.Module], declared: str
) -> None:
    """A view that was traced on row-major tensors does not exist on channels-last ones."""
    module = model().eval()
    program = _exported(module, declared)
    interpreter = Interpreter(program, _channels_last(dict(program.weights)), CPU)
    channels, height, width = InputDeclaration.parse(declared).shape[1:]
    x = torch.randn(3, channels, height, width)  # type: ignore[arg-type]
    strides = []

    def observe(_: str, value: object) -> None:
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            strides.append(value.is_contiguous(memory_format=torch.channels_last))

    answers = interpreter.run([x.contiguous(memory_format=torch.channels_last)], observe)
    results = module(x)
    for answer, expected in zip(answers, results if isinstance(results, tuple) else (results,), strict=True):
        torch.testing.assert_close(answer, expected.detach(), rtol=1e-4, atol=1e-5)
        assert answer.is_contiguous()
    assert any(strides)


@pytest.mark.parametrize("op", ["aten.as_strided.default", "aten.view.dtype"])
def test_operations_on_memory_see_it_row_major(op: str) -> None:
    args: tuple[Argument, ...] = ((2, 3), (3, 1)) if "strided" in op else (Constant("dtype", "int32"),)
    program = _program(_node("y", op, Ref("x"), *args))
    x = torch.randn(3, 2).t()
    [answer] = Interpreter(program, {}, CPU).run([x])
    expected = x.contiguous()
    assert torch.equal(answer.view(torch.float32), expected)


def test_minus_infinity_and_lifted_constants() -> None:
    module = models.Masked()
    program = _exported(module, "x:FP32[batch=1..8,3]")
    x = torch.tensor([[1.0, -1.0, 2.0]])
    torch.testing.assert_close(Interpreter(program, program.weights, CPU).run([x])[0], module(x))


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("aten.from_file.default", "not allowed"),
        ("aten.add_.Tensor", "writes to its arguments"),
        ("aten.add.out", "writes to its arguments"),
        ("aten.nonzero.default", "depends on the values"),
        ("aten._local_scalar_dense.default", "depends on the values"),
        ("aten._print.default", "does not compute a tensor"),
        ("aten.no_such_thing.default", "unknown to torch"),
        ("aten.add.no_such_overload", "unknown to torch"),
        ("aten.__class__.mro", "unknown to torch"),
        ("prim.device.default", "not allowed"),
        ("os.system", "not allowed"),
        ("operator.attrgetter", "not allowed"),
        ("torch.load", "not allowed"),
        ("", "not allowed"),
    ],
)
def test_operations_outside_the_policy_are_refused_before_anything_runs(op: str, said: str) -> None:
    ran = []

    def record(x: torch.Tensor) -> torch.Tensor:
        ran.append(x)
        return x

    program = _program(_node("a", "aten.relu.default", Ref("x")), _node("bad", op, Ref("a")))
    replacement = Replacement(frozenset({"a"}), ("x",), "a", record)
    with pytest.raises(ProgramError, match=said) as caught:
        Interpreter(program, {}, CPU, [replacement])
    assert repr(op) in str(caught.value)
    assert not ran


def test_a_refused_operation_that_nobody_needs_is_refused_too() -> None:
    program = _program(_node("bad", "aten.from_file.default", "x"), _node("y", "aten.relu.default", Ref("x")))
    with pytest.raises(ProgramError, match="from_file"):
        Interpreter(program, {}, CPU)


def test_constants_resolve_to_nothing_but_torchs() -> None:
    program = _program(_node("y", "aten._to_copy.default", Ref("x"), dtype=Constant("dtype", "load")))
    with pytest.raises(ProgramError, match="'load' is not a dtype"):
        Interpreter(program, {}, CPU)


@pytest.mark.parametrize(
    "op", ["aten.conv2d.default", "aten.scaled_dot_product_attention.default", "sym.max"]
)
def test_operations_of_the_policy_are_found(op: str) -> None:
    assert isinstance(resolve(op), Callable)  # type: ignore[arg-type]


class TestReplacements:
    program = _program(
        _node("a", "aten.relu.default", Ref("x")),
        _node("b", "aten.mul.Tensor", Ref("a"), 2.0),
        _node("c", "aten.add.Tensor", Ref("b"), Ref("x")),
    )

    def test_runs_in_place_of_what_it_covers(self) -> None:
        calls = []

        def run(x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return x.clamp(min=0) * 2

        interpreter = Interpreter(self.program, {}, CPU, [Replacement(frozenset("ab"), ("x",), "b", run)])
        x = torch.randn(2, 3)
        seen = []
        [answer] = interpreter.run([x], lambda name, _: seen.append(name))
        torch.testing.assert_close(answer, x.relu() * 2 + x)
        assert len(calls) == 1
        assert seen == ["b", "c"]

    def test_hidden_value_that_is_read_elsewhere_is_refused(self) -> None:
        hides_b = Replacement(frozenset("bc"), ("a",), "c", torch.relu)
        program = _program(*self.program.nodes, _node("d", "aten.add.Tensor", Ref("b"), Ref("c")))
        with pytest.raises(ProgramError, match="b would not be computed"):
            Interpreter(program, {}, CPU, [hides_b])

    @pytest.mark.parametrize(
        ("replacements", "said"),
        [
            ([Replacement(frozenset({"nothing"}), ("x",), "nothing", torch.relu)], "not a node"),
            ([Replacement(frozenset("a"), ("x",), "a", torch.relu)] * 2, "covered twice"),
            ([Replacement(frozenset("a"), ("c",), "a", torch.relu)], "no earlier node computes"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, replacements: list[Replacement], said: str) -> None:
        with pytest.raises(ProgramError, match=said):
            Interpreter(self.program, {}, CPU, replacements)


def test_values_are_let_go_once_nothing_reads_them() -> None:
    """A chain of large intermediates must not be alive at once."""
    nodes = [_node("n0", "aten.relu.default", Ref("x"))]
    nodes += [_node(f"n{i}", "aten.add.Tensor", Ref(f"n{i - 1}"), 1.0) for i in range(1, 6)]
    interpreter = Interpreter(_program(*nodes), {}, CPU)
    alive: list[int] = []
    references: list[torch.multiprocessing.reductions.StorageWeakRef] = []

    def observe(_: str, value: object) -> None:
        assert isinstance(value, torch.Tensor)
        references.append(torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage()))
        alive.append(sum(not reference.expired() for reference in references))

    interpreter.run([torch.randn(2, 3)], observe)
    assert max(alive) <= 2


def test_nodes_nobody_needs_do_not_run() -> None:
    program = _program(
        _node("unused", "aten.relu.default", Ref("x")), _node("y", "aten.neg.default", Ref("x"))
    )
    seen = []
    Interpreter(program, {}, CPU).run([torch.randn(2, 3)], lambda name, _: seen.append(name))
    assert seen == ["y"]


def test_a_missing_weight_and_a_missing_input_are_named() -> None:
    program = _program(_node("y", "aten.add.Tensor", Ref("x"), Ref("weight")))
    with pytest.raises(ProgramError, match="'y' reads 'weight'"):
        Interpreter(program, {}, CPU)
    with pytest.raises(ProgramError, match="0 inputs given, expected 1: x"):
        Interpreter(program, {"weight": torch.ones(3)}, CPU).run([])


class TestInferShapes:
    def test_every_tensor_gets_its_shape_without_computing(self) -> None:
        program = _exported(models.TwoSizes().eval(), "x:FP32[batch=1..4,3,h=8..40,w=8..50]")
        shapes = infer_shapes(program, {"batch": 2, "h": 9, "w": 8})
        assert shapes["x"] == (2, 3, 9, 8)
        assert shapes["conv2d"] == (2, 4, 5, 4)
        assert shapes["conv.weight"] == (4, 3, 3, 3)
        assert shapes[program.outputs[1].value] == (2, 4, 6, 4)

    def test_sizes_computed_by_nodes_are_not_tensors(self) -> None:
        program = _exported(models.ConvNet(), "x:FP32[batch=1..64,3,14,14]")
        shapes = infer_shapes(program, {"batch": 64})
        sizes = [node.name for node in program.nodes if node.op == "aten.sym_size.int"]
        assert sizes
        assert not shapes.keys() & set(sizes)
        assert shapes[program.outputs[0].value] == (64, 5)

    def test_says_which_axis_has_no_size(self) -> None:
        program = _exported(models.ConvNet(), "x:FP32[batch=1..64,3,14,14]")
        with pytest.raises(ProgramError, match="axis batch"):
            infer_shapes(program, {})

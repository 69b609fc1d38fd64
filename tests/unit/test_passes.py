"""Passes keep the answers: against the original module, where folding is right and where it is not."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Constant, Node, Program, Ref, TensorSpec
from cudnn_fusion.passes import optimize, remove_copies
from cudnn_fusion.program import export_program


def _program(model: nn.Module, declared: str, precision: str = "fp32") -> Program:
    return export_program(model, [InputDeclaration.parse(declared)], precision)[1]


def _run(program: Program, x: torch.Tensor) -> torch.Tensor:
    return Interpreter(program, program.weights, torch.device("cpu")).run([x])[0]


def _operations(program: Program) -> list[str]:
    return [node.op.split(".")[1] for node in program.nodes]


def _relative_error(answer: torch.Tensor, expected: torch.Tensor) -> float:
    return float((answer.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("fp16", 3e-3)])
@pytest.mark.parametrize(
    ("model", "channels", "folded"),
    [
        (models.ConvNet, 3, 2),
        (models.Residual, 8, 2),
        (models.NormAfterRelu, 3, 0),
        (models.NormOfSharedConv, 3, 0),
    ],
)
def test_batch_norm_is_right_wherever_it_stands(
    model: type[nn.Module], channels: int, folded: int, precision: str, bound: float
) -> None:
    """Folding past a relu or into a zero-padded convolution would be wrong by tens of percent."""
    module = model()
    program = _program(module, f"x:FP32[batch=1..8,{channels},12,12]", precision)
    x = torch.randn(3, channels, 12, 12)
    assert _relative_error(_run(program, x), module.double()(x.double()).detach()) < bound
    assert sum("folded" in note for note in program.notes) == folded
    assert not any("batch_norm" in operation for operation in _operations(program))


LAYERS = {
    "line": (nn.Conv1d(4, 6, 3, padding="same", groups=2), nn.BatchNorm1d, "conv1d"),
    "volume": (nn.Conv3d(4, 6, 3, padding=1, bias=False), nn.BatchNorm3d, "conv3d"),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d, "conv2d"),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, bias=False), nn.BatchNorm2d, "conv_transpose2d"),
    "transposed, groups": (nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d, "conv_transpose2d"),
    "transposed line": (nn.ConvTranspose1d(4, 8, 4, 2, groups=4), nn.BatchNorm1d, "conv_transpose1d"),
    "transposed volume": (nn.ConvTranspose3d(4, 6, 2, groups=2), nn.BatchNorm3d, "conv_transpose3d"),
}


class EveryLayer(nn.Module):
    """Each of `LAYERS` with its batch norm: a sequence, an image and a volume to one result of each."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList()
        for layer, kind, _ in LAYERS.values():
            norm = kind(layer.out_channels)
            with torch.no_grad():
                for values in (norm.running_var, norm.weight):
                    values.uniform_(0.5, 2, generator=generator)
                for values in (norm.running_mean, norm.bias):
                    values.uniform_(-2, 2, generator=generator)
            self.layers.append(nn.Sequential(layer, norm))

    def forward(
        self, sequence: torch.Tensor, image: torch.Tensor, volume: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        given = (sequence, image, volume)
        axes = [int(operation[-2]) for _, _, operation in LAYERS.values()]
        return tuple(layer(given[along - 1]) for layer, along in zip(self.layers, axes, strict=True))


@pytest.fixture(scope="module", params=[False, True], ids=["as exported", "decomposed"])
def every_layer(request: pytest.FixtureRequest) -> tuple[Program, dict[str, tuple[torch.Tensor, ...]]]:
    """`EveryLayer` exported from the one or the other form, and its results by name: found and expected."""
    generator = torch.Generator().manual_seed(1)
    module = EveryLayer().eval()
    xs = [torch.randn(3, 4, *(7, 6, 5)[:axes], generator=generator) for axes in (1, 2, 3)]
    model: nn.Module | torch.export.ExportedProgram = module
    if request.param:
        batch = torch.export.Dim("batch", min=1, max=8)
        exported = torch.export.export(module, tuple(xs), dynamic_shapes=({0: batch},) * 3)
        model = exported.run_decompositions()
        assert str(model.graph).count("aten.convolution.default") == len(LAYERS)
    names = ("sequence", "image", "volume")
    declared = [
        InputDeclaration.parse(f"{name}:FP32[batch=1..8,{','.join(map(str, x.shape[1:]))}]")
        for name, x in zip(names, xs, strict=True)
    ]
    program = export_program(model, declared, "fp32")[1]
    answers = Interpreter(program, program.weights, torch.device("cpu")).run(xs)
    with torch.no_grad():
        expected = module.double()(*(x.double() for x in xs))
    module.float()
    return program, dict(zip(LAYERS, zip(answers, expected, strict=True), strict=True))


def test_batch_norms_of_every_kind_of_convolution_are_gone(
    every_layer: tuple[Program, dict[str, tuple[torch.Tensor, ...]]],
) -> None:
    """In whichever of its two forms an exported graph has the convolution."""
    program, _ = every_layer
    assert sorted(_operations(program)) == sorted(operation for _, _, operation in LAYERS.values())


@pytest.mark.parametrize("name", LAYERS)
def test_batch_norm_is_folded_into_every_kind_of_convolution(
    every_layer: tuple[Program, dict[str, tuple[torch.Tensor, ...]]], name: str
) -> None:
    answer, expected = every_layer[1][name]
    assert answer.shape == expected.shape
    assert _relative_error(answer, expected) < 1e-6


def test_folding_rounds_half_precision_weights_once() -> None:
    module = models.ConvNet()
    program = _program(module, "x:FP16[batch=1..8,3,12,12]", "fp16")
    conv, norm = module.first.double(), module.first_norm.double()
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    weight = program.weights["conv2d.folded_weight"]
    assert torch.equal(weight, (conv.weight * scale[:, None, None, None]).half())
    assert torch.equal(program.weights["conv2d.folded_bias"], (norm.bias - norm.running_mean * scale).half())


def test_a_fold_that_would_leave_half_precision_is_not_done() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False, eps=0.0)).eval()
    with torch.no_grad():
        module[0].weight.fill_(1.0)
        module[1].running_var.fill_(1e-10)
        module[0].bias.zero_()
    program = _program(module, "input:FP16[b=1..8,3,4,4]", "fp16")
    x = (torch.randn(2, 3, 4, 4) * 0.01).half()
    answer, expected = _run(program, x), module(x.float()).detach()
    assert _operations(program)[0] == "conv2d"
    assert any("not folded" in note for note in program.notes)
    assert torch.isfinite(answer).all()
    assert _relative_error(answer, expected) < 5e-3


def test_a_weight_that_bears_an_inputs_name_is_not_taken_for_another() -> None:
    """Names are made distinct in the program: x becomes x_1, which the model also has."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.x = nn.Parameter(torch.randn(4, 3, 1, 1, generator=generator))
            self.x_1 = nn.Parameter(torch.randn(4, 4, 1, 1, generator=generator))
            self.x_1_1 = nn.Parameter(torch.randn(4, 3, 1, 1, generator=generator))
            self.norm = nn.BatchNorm2d(4)
            self.other = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(nn.functional.conv2d(x, self.x))
            z = self.other(nn.functional.conv2d(x, self.x_1_1))
            return nn.functional.conv2d(y, self.x_1) + z

    module = Named().eval()
    program = _program(module, "x:FP32[b=1..8,3,4,4]")
    x = torch.randn(2, 3, 4, 4)
    assert sum("folded" in note for note in program.notes) == 2
    assert _relative_error(_run(program, x), module(x).detach()) < 1e-5


def test_two_convolutions_that_share_weights_fold_their_own_batch_norms() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
            self.first.running_mean += 3
            self.second.running_var *= 9

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.conv(self.first(self.conv(x))))

    module = Shared().eval()
    program = _program(module, "x:FP32[b=1..8,4,6,6]")
    x = torch.randn(2, 4, 6, 6)
    assert _operations(program) == ["conv2d", "conv2d"]
    assert _relative_error(_run(program, x), module(x).detach()) < 1e-5


def test_statistics_beyond_half_precision_are_applied_in_float32() -> None:
    module = nn.BatchNorm2d(3).eval()
    module.running_var = torch.tensor([1e11, 1.0, 1e-3])
    module.running_mean = torch.tensor([1e4, 0.0, 0.0])
    program = _program(module, "input:FP16[b=1..8,3,4,4]", "fp16")
    x = (torch.randn(2, 3, 4, 4) * 100).half()
    answer, expected = _run(program, x), module(x.float()).detach()
    assert answer.dtype == torch.float16
    assert torch.isfinite(answer).all()
    for channel in range(3):
        assert _relative_error(answer[:, channel], expected[:, channel]) < 1e-3


def test_same_padding_is_written_out_for_even_kernels() -> None:
    module = models.SamePadding().eval()
    program = _program(module, "x:FP32[batch=1..4,3,h=8..20,9]")
    for height in (8, 13):
        x = torch.randn(2, 3, height, 9)
        torch.testing.assert_close(_run(program, x), module(x).detach(), rtol=1e-4, atol=1e-5)
    assert _operations(program) == ["constant_pad_nd", "conv2d", "constant_pad_nd", "conv2d"]
    pad, conv = program.nodes[:2]
    assert conv.op == "aten.conv2d.default"
    assert conv.args[4] == (1, 2)
    assert pad.args[1] == (0, 0, 0, 1)


def test_copies_are_removed_and_conversions_kept() -> None:
    def node(name: str, op: str, source: str, dtype: str) -> Node:
        kwargs = (("dtype", Constant("dtype", dtype)),) if "_to_copy" in op else ()
        return Node(name, op, (Ref(source),), kwargs, (2,), dtype)

    nodes = (
        node("a", "aten.clone.default", "x", "float32"),
        node("b", "aten._to_copy.default", "a", "float16"),
        node("c", "aten._to_copy.default", "b", "float16"),
        node("d", "aten.detach.default", "c", "float16"),
    )
    x, out = TensorSpec("x", "float32", (2,), "x"), TensorSpec("out", "float16", (2,), "d")
    program = remove_copies(Program("p", "fp32", (x,), (out,), (), None, nodes, {}))
    assert [(n.name, n.args) for n in program.nodes] == [("b", (Ref("x"),))]
    assert program.outputs[0].value == "b"


def test_what_no_output_needs_is_removed() -> None:
    x = TensorSpec("x", "float32", (2,), "x")
    weights = {"used": torch.ones(2), "unused": torch.ones(2)}
    nodes = (
        Node("y", "aten.add.Tensor", (Ref("x"), Ref("used")), (), (2,), "float32"),
        Node("z", "aten.add.Tensor", (Ref("y"), Ref("unused")), (), (2,), "float32"),
    )
    out = TensorSpec("out", "float32", (2,), "y")
    program = optimize(Program("p", "fp32", (x,), (out,), (), None, nodes, weights), {})
    assert [node.name for node in program.nodes] == ["y"]
    assert list(program.weights) == ["used"]


def test_tied_weights_are_stored_once() -> None:
    module = models.TiedWeights()
    program = _program(module, "x:FP32[batch=1..8,4]")
    assert list(program.weights) == ["first.weight"]
    x = torch.randn(2, 4)
    torch.testing.assert_close(_run(program, x), module(x).detach())

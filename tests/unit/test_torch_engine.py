"""Forms of the torch engine."""

import random
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from programs import bias_operand, conv_segment, sizes_of

from cudnn_fusion import accuracy
from cudnn_fusion.engines.base import CandidateRejectedError
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine, configure
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import ACTIVATIONS, Operand, Operation, is_packed

CPU = torch.device("cpu")
ENGINE = TorchEngine(CPU)


def loaded(segment, sizes, form):
    return ENGINE.load(segment, sizes, Candidate("torch", form), None, 0)


def forms(segment, sizes):
    candidates = ENGINE.candidates(segment, sizes)
    assert candidates[0] == Candidate("torch", REFERENCE_FORM)
    return [candidate.form for candidate in candidates]


def random_conv(choose, one_dimensional):
    groups = choose.choice([1, 1, 2, 3])
    c, k = groups * choose.randrange(1, 4), groups * choose.randrange(1, 4)
    r, s = choose.randrange(1, 5), 1 if one_dimensional else choose.randrange(1, 5)
    width = 1 if one_dimensional else choose.randrange(9, 14)
    attributes = {
        "stride": (choose.randrange(1, 4), choose.randrange(1, 4)),
        "dilation": (choose.randrange(1, 3), choose.randrange(1, 3)),
        "padding_before": (choose.randrange(3), 0 if one_dimensional else choose.randrange(3)),
        "padding_after": (choose.randrange(3), 0 if one_dimensional else choose.randrange(3)),
        "groups": groups,
    }
    x = (choose.randrange(1, 4), c, choose.randrange(9, 14), width)
    return attributes, x, (k, c // groups, r, s)


@pytest.mark.parametrize("seed", range(20))
def test_every_form_is_the_convolution(seed):
    print(f"seed {seed}")
    choose = random.Random(seed)
    attributes, x, w = random_conv(choose, one_dimensional=seed % 2 == 0)
    with_bias = choose.random() < 0.5
    tail, extra = ([Operation("bias", "bias")], [bias_operand()]) if with_bias else ([], [])
    segment = conv_segment(*tail, extra=extra, **attributes)
    sizes = sizes_of(segment, x, w)
    operands = accuracy.generated_operands(segment, sizes, seed, CPU)
    (top, left), (bottom, right) = attributes["padding_before"], attributes["padding_after"]
    expected = F.conv2d(
        F.pad(operands["x"], (left, right, top, bottom)),
        operands["w"],
        operands["bias"].flatten() if with_bias else None,
        attributes["stride"],
        0,
        attributes["dilation"],
        attributes["groups"],
    )
    tried = forms(segment, sizes)
    assert ("conv1d" in tried) == (seed % 2 == 0)
    assert ("unfold_matmul" in tried) == (attributes["groups"] == 1)
    for form in tried:
        result = loaded(segment, sizes, form).run(operands, None)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, msg=lambda t, f=form: f"{f}: {t}")
        assert is_packed(result, "channels_last")


OTHER_AXES = {
    "conv1d": (F.conv1d, (3, 4, 17), (6, 2, 5), {"groups": 2, "stride": (2,), "dilation": (2,)}),
    "conv1d, one sum": (F.conv1d, (3, 4, 17), (6, 4, 5), {"padding_before": (3,), "padding_after": (1,)}),
    "conv3d": (
        F.conv3d,
        (2, 4, 6, 7, 8),
        (6, 4, 3, 2, 3),
        {"stride": (1, 2, 3), "padding_before": (1, 0, 2), "padding_after": (1, 1, 0)},
    ),
    "conv3d, depthwise": (F.conv3d, (2, 4, 6, 7, 8), (8, 1, 3, 3, 3), {"groups": 4, "dilation": (2, 1, 1)}),
}


@pytest.mark.parametrize("name", OTHER_AXES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_form_along_one_or_three_axes(name, with_bias):
    function, x, w, attributes = OTHER_AXES[name]
    tail, extra = ([Operation("bias", "bias")], [bias_operand()]) if with_bias else ([], [])
    segment = conv_segment(*tail, kind=name[:6], extra=extra, **attributes)
    sizes = sizes_of(segment, x, w)
    o = accuracy.generated_operands(segment, sizes, 5, CPU)
    conv = dict(segment.operations[0].attributes)
    sides = zip(reversed(conv["padding_before"]), reversed(conv["padding_after"]), strict=True)
    whole = F.pad(o["x"], [amount for side in sides for amount in side])
    bias = o["bias"].flatten() if with_bias else None
    expected = function(whole, o["w"], bias, conv["stride"], 0, conv["dilation"], conv["groups"])
    tried = forms(segment, sizes)
    assert ("unfold_matmul" in tried) == (name == "conv1d, one sum")
    for form in tried:
        result = loaded(segment, sizes, form).run(o, None)
        assert result.shape == sizes["y"]
        assert is_packed(result, "channels_last")
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, msg=lambda t, f=form: f"{f}: {t}")


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_transposed_convolution_is_the_gradient_of_a_convolution(axes, groups):
    """The definition, and so what cuDNN is asked for, rather than torch's function of that name."""
    sizes_of_axes = {"stride": (3, 2), "dilation": (1, 2), "output_padding": (2, 0)}
    given = {name: values[:axes] for name, values in sizes_of_axes.items()}
    padding = (1, 2)[:axes]
    segment = conv_segment(
        kind=f"conv_transpose{axes}d", padding_before=padding, padding_after=padding, groups=groups, **given
    )
    sizes = sizes_of(segment, (2, 6, 5, 7)[: axes + 2], (6, 2, 4, 3)[: axes + 2])
    o = accuracy.generated_operands(segment, sizes, 5, CPU)
    y = torch.zeros(sizes["y"], requires_grad=True)
    convolve = (F.conv1d, F.conv2d)[axes - 1]
    given_back = convolve(y, o["w"], None, given["stride"], padding, given["dilation"], groups)
    assert given_back.shape == sizes["x"]
    (expected,) = torch.autograd.grad(given_back, y, o["x"])
    for form in forms(segment, sizes):
        result = loaded(segment, sizes, form).run(o, None)
        assert is_packed(result, "channels_last")
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert 0.2 < float(expected.square().mean().sqrt()) < 0.7, "generated sums stay near 1"


ATTRIBUTES = {"leaky_relu": (("negative_slope", 0.3),), "elu": (("alpha", 0.7),)}
FUNCTIONS = {
    "relu": torch.relu,
    "relu6": lambda v: v.clamp(0, 6),
    "leaky_relu": lambda v: torch.where(v > 0, v, 0.3 * v),
    "silu": lambda v: v / (1 + (-v).exp()),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": lambda v: torch.where(v > 0, v, 0.7 * (v.exp() - 1)),
    "gelu": lambda v: v * (1 + torch.erf(v / 2**0.5)) / 2,
    "gelu_tanh": lambda v: v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))) / 2,
    "hardswish": lambda v: v * (v + 3).clamp(0, 6) / 6,
    "hardsigmoid": lambda v: (v + 3).clamp(0, 6) / 6,
}


def test_every_activation_has_its_formula_here():
    assert set(FUNCTIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_whole_chains_in_every_form(kind):
    activation = Operation(kind, None, ATTRIBUTES.get(kind, ()))
    per_channel = ("scale", "shift", "scale2", "shift2")
    segment = conv_segment(
        Operation("bias", "bias"),
        Operation("scale", "scale"),
        Operation("shift", "shift"),
        Operation("add", "residual"),
        activation,
        Operation("scale", "scale2"),
        Operation("shift", "shift2"),
        extra=[
            bias_operand(),
            *(Operand(name, "float32", "channels_last", "weight") for name in per_channel),
            Operand("residual", "float32", "channels_last", "input"),
        ],
    )
    sizes = sizes_of(segment, (2, 4, 7, 1), (5, 4, 3, 1))
    o = accuracy.generated_operands(segment, sizes, 3, CPU)
    o["shift"] = torch.linspace(-7, 7, 5).view(1, 5, 1, 1)  # also where activations are flat
    value = F.conv2d(o["x"], o["w"], o["bias"].flatten()) * o["scale"] + o["shift"] + o["residual"]
    expected = FUNCTIONS[kind](value) * o["scale2"] + o["shift2"]
    for form in forms(segment, sizes):
        result = loaded(segment, sizes, form).run(o, None)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["channels_last", "row_major", "unfold_matmul", "conv1d"])
def test_a_given_output_is_filled_and_operands_are_not_touched(form):
    segment = conv_segment(Operation("relu"))
    sizes = sizes_of(segment, (3, 2, 8, 1), (4, 2, 3, 1))
    operands = accuracy.generated_operands(segment, sizes, 1, CPU)
    before = {name: value.clone() for name, value in operands.items()}
    plan = loaded(segment, sizes, form)
    out = accuracy.poison(segment, sizes, CPU)
    assert plan.run(operands, None, out) is out
    torch.testing.assert_close(out, plan.run(operands, None))
    first, second = plan.run(operands, None), plan.run(operands, None)
    assert first.data_ptr() != second.data_ptr(), "results of two runs are separate"
    for name, value in before.items():
        assert torch.equal(operands[name], value)


@pytest.mark.parametrize("misaligned_by", [2, 3])
def test_operands_need_no_alignment(misaligned_by):
    segment = conv_segment(dtype="float16", precision="fp16")
    sizes = sizes_of(segment, (2, 4, 8, 1), (4, 4, 3, 1))
    operands = accuracy.generated_operands(segment, sizes, 1, CPU)
    storage = torch.zeros(operands["x"].numel() + misaligned_by, dtype=torch.float16)[misaligned_by:]
    moved = storage.as_strided(operands["x"].shape, operands["x"].stride(), misaligned_by).copy_(
        operands["x"]
    )
    assert moved.data_ptr() % 16
    for form in forms(segment, sizes):
        plan = loaded(segment, sizes, form)
        torch.testing.assert_close(plan.run({**operands, "x": moved}, None), plan.run(operands, None))


def test_unknown_forms_are_rejected():
    segment = conv_segment(groups=2)
    sizes = sizes_of(segment, (1, 4, 8, 8), (4, 2, 3, 3))
    for form in ("winograd", "unfold_matmul", "conv1d"):
        with pytest.raises(CandidateRejectedError, match=f"torch has no form '{form}'"):
            loaded(segment, sizes, form)
    with pytest.raises(CandidateRejectedError):
        ENGINE.build(segment, sizes, Candidate("cudnn", REFERENCE_FORM))


def test_a_gpu_has_the_reference_form_alone():
    segment = conv_segment()
    sizes = sizes_of(segment, (1, 4, 8, 1), (4, 4, 3, 1))
    candidates = TorchEngine(torch.device("cuda")).candidates(segment, sizes)
    assert candidates == [Candidate("torch", REFERENCE_FORM)]


def test_tf32_is_on_only_where_it_is_asked_for():
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for precision in ("tf32", "fp32", "tf32", "fp16"):
            configure(precision)
            wanted = precision == "tf32"
            assert torch.backends.cuda.matmul.allow_tf32 is wanted
            assert torch.backends.cudnn.allow_tf32 is wanted
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def test_forms_differ_in_speed():
    """Choosing among them is worth it: CREPE's first layer, 8 frames."""
    segment = conv_segment(
        Operation("bias", "bias"),
        Operation("relu"),
        extra=[bias_operand()],
        stride=(4, 1),
        padding_before=(254, 0),
        padding_after=(254, 0),
    )
    sizes = sizes_of(segment, (8, 1, 1024, 1), (128, 1, 512, 1))
    operands = accuracy.generated_operands(segment, sizes, 1, CPU)
    medians = {}
    for form in forms(segment, sizes):
        plan = loaded(segment, sizes, form)
        plan.run(operands, None)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            plan.run(operands, None)
            times.append(time.perf_counter() - started)
        medians[form] = statistics.median(times)
    assert len(medians) == 4
    assert max(medians.values()) / min(medians.values()) > 1.3, medians

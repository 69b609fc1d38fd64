"""What becomes a segment, what is left to torch, and that answers stay the same."""

import os
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from programs import Chains, program_of, run_in_torch, run_with_sites
from torch import nn

from cudnn_fusion.evaluate import evaluate
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.lowered import Axis, Node, Program, Ref, TensorSpec
from cudnn_fusion.partition import partition
from cudnn_fusion.segment import per_channel_dims

TOLERANCES = {"fp32": (1e-4, 1e-5), "fp16": (1e-2, 4e-3), "bf16": (6e-2, 3e-2)}


class Function(nn.Module):
    """``function(x, *layers)``."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


class PerChannel(nn.Module):
    """Multiplies by a scale and adds a shift, each if asked for, [1,K,1,1] or as many dims as said."""

    def __init__(self, channels, scale=True, shift=True, dims=4, axes=2):
        super().__init__()
        shape = (1, channels, *(1,) * axes)[-dims:]
        self.scale = nn.Parameter(torch.randn(shape)) if scale else None
        self.shift = nn.Parameter(torch.randn(shape)) if shift else None

    def forward(self, x):
        x = x if self.scale is None else x * self.scale
        return x if self.shift is None else x + self.shift


def conv(k=4, r=3, c=4, **arguments):
    return nn.Conv2d(c, k, r, **{"padding": r // 2, **arguments})


def constant_pad(value, *amounts):
    return Function(lambda x, c: c(F.pad(x, amounts, value=value)), conv(padding=0))


def line(chain):
    """The chain behind [5,4,81]."""
    return Function(lambda x, c: c(x.flatten(2)), chain)


def volume(chain):
    """The chain behind [5,4,3,3,9]."""
    return Function(lambda x, c: c(x.unflatten(2, (3, 3))), chain)


# name: (chain, describe() of each of its segments)
CHAINS = {
    "plain": (conv(), ["conv2d+bias"]),
    "no bias": (conv(bias=False), ["conv2d"]),
    "stride": (conv(stride=(2, 1)), ["conv2d+bias"]),
    "dilation": (conv(dilation=(1, 2)), ["conv2d+bias"]),
    "groups": (conv(groups=2), ["conv2d+bias"]),
    "depthwise": (conv(groups=4, bias=False), ["conv2d"]),
    "depthwise, two of each channel": (nn.Sequential(conv(8, groups=4), nn.ReLU()), ["conv2d+bias+relu"]),
    "even kernel, same padding": (nn.Conv2d(4, 4, (4, 2), padding="same"), ["conv2d+bias"]),
    "zero pad": (constant_pad(0.0, 1, 0, 2, 1), ["conv2d+bias"]),
    "zero pad of one axis": (constant_pad(0.0, 2, 1), ["conv2d+bias"]),
    "other pad": (constant_pad(1.0, 1, 0, 2, 1), ["conv2d+bias"]),
    "negative pad": (constant_pad(0.0, -1, 0, 2, 1), ["conv2d+bias"]),
    "reflected pad": (
        Function(lambda x, c: c(F.pad(x, (1, 1, 1, 1), mode="reflect")), conv(padding=0)),
        ["conv2d+bias"],
    ),
    "pad used twice": (
        Function(lambda x, c: c(p := F.pad(x, (1, 1, 1, 1))) + p[:, :, 1:-1, 1:-1], conv(padding=0)),
        ["conv2d+bias+add"],
    ),
    "relu": (nn.Sequential(conv(), nn.ReLU()), ["conv2d+bias+relu"]),
    "relu6": (nn.Sequential(conv(), nn.ReLU6()), ["conv2d+bias+relu6"]),
    "hardtanh": (nn.Sequential(conv(), nn.Hardtanh(0, 6)), ["conv2d+bias+relu6"]),
    "other hardtanh": (nn.Sequential(conv(), nn.Hardtanh(0, 5)), ["conv2d+bias"]),
    "default hardtanh": (nn.Sequential(conv(), nn.Hardtanh()), ["conv2d+bias"]),
    "leaky relu": (nn.Sequential(conv(), nn.LeakyReLU()), ["conv2d+bias+leaky_relu"]),
    "steeper leaky relu": (nn.Sequential(conv(), nn.LeakyReLU(0.3)), ["conv2d+bias+leaky_relu"]),
    "silu": (nn.Sequential(conv(), nn.SiLU()), ["conv2d+bias+silu"]),
    "sigmoid": (nn.Sequential(conv(), nn.Sigmoid()), ["conv2d+bias+sigmoid"]),
    "tanh": (nn.Sequential(conv(), nn.Tanh()), ["conv2d+bias+tanh"]),
    "two activations": (nn.Sequential(conv(), nn.ReLU(), nn.Tanh()), ["conv2d+bias+relu"]),
    "gelu": (nn.Sequential(conv(), nn.GELU()), ["conv2d+bias+gelu"]),
    "approximate gelu": (nn.Sequential(conv(), nn.GELU("tanh")), ["conv2d+bias+gelu_tanh"]),
    "elu": (nn.Sequential(conv(), nn.ELU()), ["conv2d+bias+elu"]),
    "lower elu": (nn.Sequential(conv(), nn.ELU(0.3)), ["conv2d+bias+elu"]),
    "hardswish": (nn.Sequential(conv(), nn.Hardswish()), ["conv2d+bias+hardswish"]),
    "hardsigmoid": (nn.Sequential(conv(), nn.Hardsigmoid()), ["conv2d+bias+hardsigmoid"]),
    "selu": (nn.Sequential(conv(), nn.SELU()), ["conv2d+bias"]),
    "scale and shift": (nn.Sequential(conv(), PerChannel(4)), ["conv2d+bias+scale+shift"]),
    "scale before, shift behind": (
        nn.Sequential(conv(), PerChannel(4, shift=False), nn.ReLU(), PerChannel(4, scale=False, dims=3)),
        ["conv2d+bias+scale+relu+shift"],
    ),
    "before and behind": (
        nn.Sequential(conv(), PerChannel(4), nn.SiLU(), PerChannel(4, dims=3)),
        ["conv2d+bias+scale+shift+silu+scale+shift"],
    ),
    "three scales": (
        nn.Sequential(conv(), *(PerChannel(4, shift=False) for _ in range(3))),
        ["conv2d+bias+scale+scale"],
    ),
    "batch norm behind relu": (nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(4)), None),
    "residual": (Function(lambda x, c: c(x) + x, conv()), ["conv2d+bias+add"]),
    "residual first": (Function(lambda x, c: F.relu(x + c(x)), conv()), ["conv2d+bias+add+relu"]),
    "two convs added": (
        Function(lambda x, a, b: F.relu(a(x) + b(x)), conv(), conv()),
        ["conv2d+bias+add+relu", "conv2d+bias"],
    ),
    "downsample": (
        Function(
            lambda x, a, b, d: F.relu(b(F.relu(a(x))) + d(x)),
            conv(stride=2),
            conv(),
            conv(r=1, stride=2, bias=False),
        ),
        ["conv2d+bias+relu", "conv2d+bias+add+relu", "conv2d"],
    ),
    "two residuals": (Function(lambda x, c: c(x) + x + x.abs(), conv()), ["conv2d+bias+add"]),
    "added to itself": (Function(lambda x, c: (y := c(x)) + y, conv()), ["conv2d+bias"]),
    "alpha": (Function(lambda x, c: torch.add(c(x), x, alpha=2), conv()), ["conv2d+bias"]),
    "broadcast residual": (Function(lambda x, c: c(x) + x[:, :1], conv()), ["conv2d+bias"]),
    "broadcast over the batch": (Function(lambda x, c: c(x) + x[:1], conv()), ["conv2d+bias"]),
    "broadcast result": (
        Function(lambda x, c: c(x) + x, conv(k=1)),
        ["conv2d+bias"],
    ),
    "used twice": (Function(lambda x, c: F.relu(y := c(x)) + y.mean(), conv()), ["conv2d+bias"]),
    "scaled by itself": (Function(lambda x, c: (y := c(x)) * y, conv()), ["conv2d+bias"]),
    "scaled by a tensor": (Function(lambda x, c: c(x) * x, conv()), ["conv2d+bias"]),
    "number added": (Function(lambda x, c: F.relu(c(x) + 1.0), conv()), ["conv2d+bias"]),
    "squeeze and excite": (
        Function(lambda x, c: x * torch.sigmoid(c(x.mean((2, 3), keepdim=True))), conv(r=1)),
        ["conv2d+bias+sigmoid"],
    ),
    "one conv for two": (
        Function(lambda x, c: c(F.relu(c(x))), conv()),
        ["conv2d+bias+relu", "conv2d+bias"],
    ),
    "line": (line(nn.Conv1d(4, 6, 5, 2, 2, 1, 2)), ["conv1d+bias"]),
    "line, depthwise": (line(nn.Conv1d(4, 8, 5, groups=4, bias=False)), ["conv1d"]),
    "line, even kernel, same padding": (line(nn.Conv1d(4, 4, 4, padding="same")), ["conv1d+bias"]),
    "line, zero pad": (line(nn.Sequential(nn.ZeroPad1d((3, 1)), nn.Conv1d(4, 4, 5))), ["conv1d+bias"]),
    "line, per channel": (
        line(
            nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), PerChannel(6, axes=1), PerChannel(6, dims=2, axes=1))
        ),
        ["conv1d+bias+relu+scale+shift+scale+shift"],
    ),
    "line, residual": (
        line(Function(lambda x, c: F.silu(c(x) + x), nn.Conv1d(4, 4, 3, padding=1))),
        ["conv1d+bias+add+silu"],
    ),
    "volume": (volume(nn.Sequential(nn.Conv3d(4, 6, 3, (1, 1, 2), 1), nn.ReLU())), ["conv3d+bias+relu"]),
    "volume, depthwise": (volume(nn.Conv3d(4, 8, 3, padding=1, groups=4, bias=False)), ["conv3d"]),
    "volume, same padding": (volume(nn.Conv3d(4, 4, (2, 3, 4), padding="same")), ["conv3d+bias"]),
    "volume, zero pad": (
        volume(Function(lambda x, c: c(F.pad(x, (1, 0, 2, 1, 0, 1))), nn.Conv3d(4, 4, 2))),
        ["conv3d+bias"],
    ),
    "volume, all": (
        volume(
            Function(
                lambda x, c, p: F.relu(p(c(x)) + x),
                nn.Conv3d(4, 4, 3, padding=1),
                PerChannel(4, dims=4, axes=3),
            )
        ),
        ["conv3d+bias+scale+shift+add+relu"],
    ),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.ReLU()),
        ["conv_transpose2d+bias+relu"],
    ),
    "transposed, all arguments": (
        nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, False, (2, 1)),
        ["conv_transpose2d"],
    ),
    "transposed, pad": (
        Function(lambda x, c: c(F.pad(x, (1, 1, 1, 1))), nn.ConvTranspose2d(4, 4, 2, 2)),
        ["conv_transpose2d+bias"],
    ),
    "transposed, residual": (
        Function(lambda x, c: c(x[:, :, ::3, ::3]) + x, nn.ConvTranspose2d(4, 4, 3, 3)),
        ["conv_transpose2d+bias+add"],
    ),
    "transposed line": (
        line(nn.Sequential(nn.ConvTranspose1d(4, 6, 4, 2, 1, 1), nn.ELU())),
        ["conv_transpose1d+bias+elu"],
    ),
    "transposed volume": (volume(nn.ConvTranspose3d(4, 6, 2, 2)), []),
    "transposed, output padding from dilation": (
        nn.ConvTranspose2d(4, 4, 3, 1, 0, 1, dilation=2),
        [],
    ),
    "weight made at run time": (
        Function(lambda x, c: F.conv2d(x, c.weight * x.mean(), c.bias), conv()),
        [],
    ),
}


@pytest.fixture(scope="module", params=["fp32", "fp16", "bf16"])
def each_chain(request):
    """Every chain of CHAINS in one program, with its sites by chain."""
    torch.manual_seed(1)
    module = Chains([chain for chain, _ in CHAINS.values()])
    program = program_of(module, "x:FP32[5,4,9,9]", precision=request.param)
    return program, partition(program)


def chain_of(site):
    """The index in CHAINS, from the weight's name."""
    return int(site.value("w").split(".")[1])


def test_every_chain_becomes_the_segments_it_should(each_chain):
    _, parts = each_chain
    found = {name: [] for name in CHAINS}
    for site in parts.sites:
        found[list(CHAINS)[chain_of(site)]].append(site.segment.describe())
    expected = {name: segments for name, (_, segments) in CHAINS.items() if segments is not None}
    assert {name: sorted(found[name]) for name in expected} == {n: sorted(s) for n, s in expected.items()}


def test_every_node_is_in_one_place(each_chain):
    program, parts = each_chain
    covered = [name for site in parts.sites for name in site.covers]
    left = [item.node for item in parts.left]
    assert sorted(covered + left) == sorted(n.name for n in program.nodes if "sym_" not in n.op)
    assert all(item.reason for item in parts.left)


def test_answers_are_those_of_torch(each_chain):
    program, _ = each_chain
    x = torch.randn(5, 4, 9, 9, generator=torch.Generator().manual_seed(2))
    rtol, atol = TOLERANCES[program.precision]
    expected = run_in_torch(program, x)
    for form in ("channels_last", "row_major"):
        got = run_with_sites(program, x, form=form)
        for name, result, wanted in zip(CHAINS, got, expected, strict=True):
            torch.testing.assert_close(
                result.float(), wanted.float(), rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )


def site_of(parts, name):
    return next(s for s in parts.sites if list(CHAINS)[chain_of(s)] == name)


@pytest.mark.parametrize(
    ("name", "before", "after", "stride", "dilation", "groups"),
    [
        ("stride", (1, 1), (1, 1), (2, 1), (1, 1), 1),
        ("dilation", (1, 1), (1, 1), (1, 1), (1, 2), 1),
        ("groups", (1, 1), (1, 1), (1, 1), (1, 1), 2),
        ("even kernel, same padding", (1, 0), (2, 1), (1, 1), (1, 1), 1),
        ("zero pad", (2, 1), (1, 0), (1, 1), (1, 1), 1),
        ("zero pad of one axis", (0, 2), (0, 1), (1, 1), (1, 1), 1),
        ("other pad", (0, 0), (0, 0), (1, 1), (1, 1), 1),
        ("negative pad", (0, 0), (0, 0), (1, 1), (1, 1), 1),
        ("pad used twice", (0, 0), (0, 0), (1, 1), (1, 1), 1),
        ("line", (2,), (2,), (2,), (1,), 2),
        ("line, even kernel, same padding", (1,), (2,), (1,), (1,), 1),
        ("line, zero pad", (3,), (1,), (1,), (1,), 1),
        ("volume", (1, 1, 1), (1, 1, 1), (1, 1, 2), (1, 1, 1), 1),
        ("volume, same padding", (0, 1, 1), (1, 1, 2), (1, 1, 1), (1, 1, 1), 1),
        ("volume, zero pad", (0, 2, 1), (1, 1, 0), (1, 1, 1), (1, 1, 1), 1),
    ],
)
def test_attributes_of_the_convolution(each_chain, name, before, after, stride, dilation, groups):
    attributes = dict(site_of(each_chain[1], name).segment.operations[0].attributes)
    assert attributes == {
        "padding_before": before,
        "padding_after": after,
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
    }


def test_attributes_of_a_transposed_convolution(each_chain):
    attributes = dict(site_of(each_chain[1], "transposed, all arguments").segment.operations[0].attributes)
    assert attributes == {
        "padding_before": (1, 0),
        "padding_after": (1, 0),
        "stride": (2, 3),
        "dilation": (2, 1),
        "groups": 2,
        "output_padding": (1, 2),
    }


def test_why_a_transposed_convolution_is_left(each_chain):
    reasons = {item.reason for item in each_chain[1].left if "transpose" in item.op and "conv" in item.op}
    assert reasons == {
        "cuDNN has no fused plan for a transposed convolution along three axes",
        "no convolution is its transpose: its output padding is not smaller than its stride",
    }


def test_operands_say_what_changes_from_request_to_request(each_chain):
    program, parts = each_chain
    segment = site_of(parts, "downsample").segment
    kind = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[program.precision]
    assert {o.dtype for o in segment.operands} == {kind}
    assert segment.precision == program.precision
    residual = next(s for s in parts.sites if s.segment.describe() == "conv2d+bias+add").segment
    assert [(o.name, o.role) for o in residual.operands] == [
        ("x", "input"),
        ("w", "weight"),
        ("bias", "weight"),
        ("residual", "input"),
        ("y", "output"),
    ]


def test_reasons_say_what_is_wrong():
    class Refused(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)
            self.line = nn.Conv1d(8, 4, 3)
            self.volume = nn.Conv3d(4, 4, 3)

        def forward(self, x):
            own_weight = F.conv2d(x, x[:, :, :3, :3])
            own_bias = F.conv2d(x, self.conv.weight, x[:, 0, 0, 0])
            no_batch = F.conv2d(x[0], self.conv.weight)
            return own_weight, own_bias, no_batch, self.line(x[0, 0]), self.volume(x), x.exp()

    parts = partition(program_of(Refused(), "x:FP32[4,4,8,8]"))
    reasons = [item.reason for item in parts.left if "conv" in item.op]
    assert "its input is not a batch of sequences [N, C, L]" in reasons
    assert "its input is not a batch of volumes [N, C, D, H, W]" in reasons
    assert "its weight is computed while the model runs" in reasons
    assert "its bias is computed while the model runs" in reasons
    assert "its input is not a batch of images [N, C, H, W]" in reasons
    assert "no fusible convolution directly before it takes it in" in {i.reason for i in parts.left}
    assert not parts.sites


def test_sizes_that_follow_from_a_request_are_left_to_torch():
    nodes = tuple(
        Node(name, op, (Ref("x"), Ref("w"), None, *rest), (), ("batch", 4, "length"), "float32")
        for name, op, rest in (
            ("up", "aten.conv_transpose1d.default", ((2,), (0,), (Ref("more"),))),
            ("along", "aten.conv1d.default", ((1,), (Ref("more"),))),
        )
    )
    size = Node("more", "operator.mod", (Ref("x"), 2), (), None, None)
    dims = ("batch", 4, "length")
    program = Program(
        name="sized",
        precision="fp32",
        inputs=(TensorSpec("x", "float32", dims, "x"),),
        outputs=tuple(TensorSpec(node.name, "float32", dims, node.name) for node in nodes),
        axes=(Axis("batch", 1, 4), Axis("length", 4, 9)),
        batch_axis="batch",
        nodes=(size, *nodes),
        weights={"w": torch.randn(4, 4, 3)},
    )
    parts = partition(program)
    assert not parts.sites
    reasons = {item.node: item.reason for item in parts.left}
    assert {reasons[node.name] for node in nodes} == {"its stride or padding follows from a request's sizes"}


def test_an_operation_with_several_results_is_named_too():
    """Its node has no one shape, and what is not named cannot be explained."""

    class Largest(nn.Module):
        def forward(self, x):
            values, places = x.max(1)
            return values, places, x.shape[0] * x

    program = program_of(Largest(), "x:FP32[batch=1..4,4,8,8]")
    named = {item.op for item in partition(program).left}
    assert {"aten.max.dim", "operator.getitem", "aten.mul.Tensor"} <= named
    assert not [op for op in named if "sym_" in op]
    assert any("sym_" in node.op for node in program.nodes), "the program holds a size"


def test_double_precision_is_left_to_torch():
    node = Node("c", "aten.conv2d.default", (Ref("x"), Ref("w")), (), (1, 2, 3, 3), "float64")
    program = Program(
        name="double",
        precision="fp32",
        inputs=(TensorSpec("x", "float64", (1, 2, 3, 3), "x"),),
        outputs=(TensorSpec("y", "float64", (1, 2, 3, 3), "c"),),
        axes=(),
        batch_axis=None,
        nodes=(node,),
        weights={"w": torch.zeros(2, 2, 1, 1, dtype=torch.float64)},
    )
    parts = partition(program)
    assert not parts.sites
    assert parts.left[0].reason == "its type float64 is none of float32, float16, bfloat16"
    single = replace(program, nodes=(replace(node, dtype="float32"),), weights={"w": torch.zeros(2, 2, 1, 1)})
    assert len(partition(single).sites) == 1, "defaults of the operator's arguments are filled in"


class _Middle(nn.Module):
    """Every intermediate value is an output as well."""

    def __init__(self):
        super().__init__()
        self.first = conv()
        self.second = conv()

    def forward(self, x):
        padded = F.pad(x, (1, 1, 1, 1))
        y = self.first(padded)
        z = torch.relu(y)
        w = self.second(z) + z
        return padded, y, z, w, torch.tanh(w)


@pytest.mark.parametrize(
    ("op", "rest", "kwargs", "taken"),
    [
        ("aten.relu6.default", (), (), "relu6"),
        ("aten.hardtanh.default", (0, 6), (), "relu6"),
        ("aten.hardtanh.default", (0.0,), (("max_val", 6.0),), "relu6"),
        ("aten.hardtanh.default", (), (("max_val", 6.0),), None),
        ("aten.leaky_relu.default", (), (), "leaky_relu"),
        ("aten.leaky_relu.default", (), (("negative_slope", 0.5),), "leaky_relu"),
        ("aten.elu.default", (), (), "elu"),
        ("aten.elu.default", (0.5,), (), "elu"),
        ("aten.elu.default", (), (("alpha", 0.5),), "elu"),
        ("aten.elu.default", (1.0, 1.05), (), None),
        ("aten.elu.default", (1.0,), (("input_scale", 2.0),), None),
        ("aten.gelu.default", (), (), "gelu"),
        ("aten.gelu.default", (), (("approximate", "none"),), "gelu"),
        ("aten.gelu.default", (), (("approximate", "tanh"),), "gelu_tanh"),
        ("aten.hardswish.default", (), (), "hardswish"),
        ("aten.hardsigmoid.default", (), (), "hardsigmoid"),
        ("aten.softplus.default", (), (), None),
    ],
)
def test_activations_however_their_arguments_are_given(op, rest, kwargs, taken):
    dims = ("batch", 2, 3, 3)
    program = Program(
        name="activation",
        precision="fp32",
        inputs=(TensorSpec("x", "float32", dims, "x"),),
        outputs=(TensorSpec("y", "float32", dims, "a"),),
        axes=(Axis("batch", 1, 4),),
        batch_axis="batch",
        nodes=(
            Node("c", "aten.conv2d.default", (Ref("x"), Ref("w")), (), dims, "float32"),
            Node("a", op, (Ref("c"), *rest), kwargs, dims, "float32"),
        ),
        weights={"w": torch.randn(2, 2, 1, 1)},
    )
    (site,) = partition(program).sites
    assert site.segment.describe() == ("conv2d" if taken is None else f"conv2d+{taken}")
    x = 9 * torch.randn(2, 2, 3, 3)
    torch.testing.assert_close(run_with_sites(program, x), run_in_torch(program, x))


def test_outputs_in_the_middle_are_kept():
    program = program_of(_Middle(), "x:FP32[batch=1..4,4,6,6]")
    parts = partition(program)
    assert [site.segment.describe() for site in parts.sites] == ["conv2d+bias", "conv2d+bias+add"]
    x = torch.randn(3, 4, 6, 6)
    for got, wanted in zip(run_with_sites(program, x), run_in_torch(program, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_residual_may_be_a_weight():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv()
            self.positions = nn.Parameter(torch.randn(1, 4, 6, 6))

        def forward(self, x):
            return self.conv(x) + self.positions

    program = program_of(Positions(), "x:FP32[1,4,6,6]")
    (site,) = partition(program).sites
    assert site.segment.describe() == "conv2d+bias+add"
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(run_with_sites(program, x), run_in_torch(program, x), rtol=1e-4, atol=1e-5)
    batched = program_of(Positions(), "x:FP32[batch=1..4,4,6,6]")
    assert partition(batched).sites[0].segment.describe() == "conv2d+bias", "it is broadcast there"


CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}
SPATIAL = {1: (144,), 2: (12, 12), 3: (4, 3, 12)}


def random_layer(choose, axes, channels):
    """A convolution along ``axes``, transposed or not, with some of its arguments drawn."""

    def each(*values):
        return tuple(choose.choice(values) for _ in range(axes))

    groups = choose.choice([1, 1, 1, 2, channels])
    bias = choose.random() < 0.7
    if axes < 3 and choose.random() < 0.2:
        stride = each(1, 2)
        more = tuple(choose.randrange(size) for size in stride)
        kernel, dilation = each(2, 3), each(1, 2)
        return TRANSPOSED[axes](
            channels, channels, kernel, stride, each(0, 1), more, groups, bias, dilation=dilation
        )
    kernel = each(1, 2, 3) if axes == 3 else each(1, 2, 3, 5)
    padding = tuple(choose.choice([size // 2, size - 1]) for size in kernel)
    # Dilated by 2 a padded kernel still fits the shortest axis there is.
    return CONVS[axes](channels, channels, kernel, each(1, 1, 2), padding, each(1, 1, 2), groups, bias)


def random_chain(choose, channels=4):
    """A short function of [N,4,12,12] as 1, 2 or 3 axes: a convolution with some of everything behind it."""
    axes = choose.choice([1, 2, 2, 3])
    layer = random_layer(choose, axes, channels)
    amounts = choose.choice([None, (1, 0), (2, 2), (0, 1, 2, 0), (1, 1, 1, 1), (0, 0, 1, 0, 2, 1)])
    amounts = None if amounts is None else amounts[: 2 * axes]
    value = choose.choice([0.0, 0.0, 0.5])

    def same(r=3, **arguments):
        return CONVS[axes](channels, channels, r, padding=r // 2, **arguments)

    steps = [
        choose.choice(
            [
                nn.ReLU(),
                nn.ReLU6(),
                nn.LeakyReLU(choose.choice([0.01, 0.2])),
                nn.SiLU(),
                nn.Sigmoid(),
                nn.Tanh(),
                nn.ELU(choose.choice([1.0, 0.4])),
                nn.GELU(choose.choice(["none", "tanh"])),
                nn.Hardswish(),
                nn.Hardsigmoid(),
                nn.Softplus(),
                PerChannel(channels, shift=False, axes=axes, dims=axes + 2),
                PerChannel(channels, scale=False, axes=axes, dims=axes + 1),
                PerChannel(channels, axes=axes, dims=axes + 2),
                Function(lambda x: x + x),
                Function(lambda x: torch.roll(x, 1, 2) + x),
                Function(lambda x: x + x.mean(1, keepdim=True)),
                Function(lambda x: torch.add(x, x.abs(), alpha=0.5)),
                Function(lambda x, c: c(x) + x, same()),
                Function(lambda x, c: torch.relu(x + c(x)), same(groups=2)),
                Function(lambda x, a, b: a(x) + b(x), same(), same(r=1)),
            ]
        )
        for _ in range(choose.randrange(5))
    ]

    def run(x, first, *rest):
        x = x.view(-1, channels, *SPATIAL[axes])
        x = first(x if amounts is None else F.pad(x, amounts, value=value))
        for step in rest:
            x = step(x)
        return x

    return Function(run, layer, *steps)


@pytest.mark.parametrize("seed", range(int(os.environ.get("CHAIN_SEEDS", "3"))))
def test_random_chains_give_the_answers_of_torch(seed):
    """To repeat one: ``random_chain`` number i of ``random.Random(seed)``."""
    print(f"seed {seed}")
    choose = random.Random(seed)
    torch.manual_seed(seed)
    chains = [random_chain(choose) for _ in range(8)]
    program = program_of(Chains(chains), "x:FP32[batch=1..4,4,12,12]")
    parts = partition(program)
    assert {chain_of(site) for site in parts.sites} == set(range(8)), "each chain has a segment"
    covered = [name for site in parts.sites for name in site.covers]
    assert len(covered) == len(set(covered))
    x = torch.randn(3, 4, 12, 12)
    got = run_with_sites(program, x, form=choose.choice(["channels_last", "row_major", "unfold_matmul"]))
    for index, (result, wanted) in enumerate(zip(got, run_in_torch(program, x), strict=True)):
        torch.testing.assert_close(
            result, wanted, rtol=1e-4, atol=2e-5, msg=lambda text, i=index: f"seed {seed}, chain {i}: {text}"
        )


@pytest.mark.parametrize("each_chain", ["fp32"], indirect=True)
def test_a_segment_means_what_its_nodes_mean(each_chain):
    """The float64 reference is made from the segment alone: it must not differ from the program."""
    program, parts = each_chain
    seen = {}
    x = torch.randn(5, 4, 9, 9, dtype=torch.float32)
    Interpreter(program, program.weights, x.device).run([x], lambda name, value: seen.update({name: value}))
    values = {**program.weights, **seen, program.inputs[0].value: x}
    for site in parts.sites:
        operands = {}
        for operand in site.segment.inputs:
            value = values[site.value(operand.name)].double()
            per_channel = operand.role == "weight" and operand.name != "w"
            dims = per_channel_dims(-1, values[site.value("w")].dim())
            operands[operand.name] = value.reshape(dims) if per_channel else value
        torch.testing.assert_close(
            evaluate(site.segment.operations, operands).float(),
            values[site.value("y")],
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, s=site: f"{s.name} {s.segment.describe()}: {text}",
        )

"""Linear layers over the channels of images as 1x1 convolutions, and how values lie."""

import pytest
import torch
from programs import CPU, cache_of, program_of
from torch import nn

from cudnn_fusion import executor
from cudnn_fusion.engines import torch_eager
from cudnn_fusion.executor import Executor, Resources
from cudnn_fusion.partition import partition
from cudnn_fusion.segment import is_packed
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.values import Values


class NextBlock(nn.Module):
    """A block of ConvNeXt; ``shape`` of its scale as models write it."""

    def __init__(self, scale_dims=(6,), bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12, bias=bias)
        self.down = nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.rand(scale_dims))

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.down(nn.functional.gelu(self.up(self.norm(y))))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class Windows(nn.Module):
    """[N, H, W, C] all along, one linear layer used twice, an output of each kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        z = self.linear(y) * 0.5 - y
        return z, z.permute(0, 3, 1, 2), y.roll(1, 1).softmax(-1)


def check(module, declaration, x):
    """The program with its segments and regions against the module; gives their descriptions."""
    program = program_of(module, declaration)
    found = partition(program, with_regions=True)
    resources = Resources(program, found, CPU)
    bucket = Bucket.of({"batch": len(x)})
    cache = cache_of([])
    plans = [
        cache.find(site.segment, sizes)
        for site, sizes in zip(found.sites, resources.segment_sizes(bucket), strict=True)
    ]
    ready = Executor(resources, bucket, plans, capture=True)
    ready.inputs[0].copy_(x)
    with torch.no_grad():
        expected = module(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for output, wanted in zip(ready.run(), expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    return [site.segment.describe() for site in found.sites]


@pytest.mark.parametrize("scale_dims", [(6,), (1, 1, 1, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_block_of_convnext_is_three_convolutions_and_a_norm(scale_dims, bias):
    segments = check(NextBlock(scale_dims, bias), "x:FP32[batch=1..4,6,5,7]", torch.randn(3, 6, 5, 7))
    up = "conv2d+bias+gelu" if bias else "conv2d+gelu"
    assert sorted(segments) == sorted(["conv2d+bias", "permute+layer_norm", up, "conv2d+bias+scale+add"])


def test_a_block_of_convnext_moves_nothing_in_memory(monkeypatch):
    """Permuting a channels-last image costs nothing, as long as each value stays as it lies."""
    copies = []
    for module in (executor, torch_eager):
        plain = module.to_layout

        def watched(tensor, layout, plain=plain):
            if not is_packed(tensor, layout):
                copies.append((tuple(tensor.shape), layout))
            return plain(tensor, layout)

        monkeypatch.setattr(module, "to_layout", watched)
    check(NextBlock(), "x:FP32[batch=1..4,6,5,7]", torch.randn(3, 6, 5, 7))
    assert copies == []


def test_images_that_stay_permuted_mean_the_same():
    segments = check(Windows(), "x:FP32[batch=1..4,5,7,6]", torch.randn(2, 5, 7, 6))
    assert segments.count("conv2d+bias+relu") == 1


@pytest.mark.parametrize("dims", ["6", "5,6", "2,5,7,6"])
def test_linear_layers_on_other_values_are_left(dims):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x):
            return self.linear(x)

    program = program_of(Alone(), f"x:FP32[batch=1..4,{dims}]")
    assert [node.op for node in program.nodes] == ["aten.linear.default"]


def test_a_weight_that_is_computed_is_no_kernel():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 6))

        def forward(self, x):
            return nn.functional.linear(x, self.weight.exp())

    program = program_of(Computed(), "x:FP32[batch=1..4,5,7,6]")
    assert "aten.linear.default" in [node.op for node in program.nodes]


def test_how_values_lie():
    class Values4(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(6, 6, 1)

        def forward(self, x):
            image = self.conv(x)
            rows = image.permute(0, 2, 3, 1)
            scores = torch.matmul(rows, rows.transpose(2, 3)).softmax(-1)
            return torch.tanh(image), torch.tanh(rows), scores, rows.permute(0, 3, 1, 2).sin()

    program = program_of(Values4(), "x:FP32[batch=1..4,6,5,5]")
    values = Values(program)
    found = [values.layout(output.value) for output in program.outputs]
    assert found == ["channels_last", "row_major", "row_major", "channels_last"]

"""Sums of two 1x1 convolutions, which on a GPU are one convolution."""

from dataclasses import replace

import pytest
import torch
from programs import CPU, cache_of, program_of
from torch import nn

from cudnn_fusion import whole_model
from cudnn_fusion.executor import Executor, Resources
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.joined_sums import join_sums
from cudnn_fusion.lowered import cast, in_type
from cudnn_fusion.partition import for_device, partition
from cudnn_fusion.shapes import Bucket

IMAGE = "x:FP16[batch=1..4,8,h=8..17,9]"
INPUTS = {1: "x:FP16[batch=1..4,8,l=8..17]", 2: IMAGE, 3: "x:FP16[batch=1..4,8,5,h=8..17,9]"}


class Sum(nn.Module):
    """A block's last convolution plus the shortcut's, of ``rank`` spatial axes."""

    def __init__(self, rank=2, stride=2, kernel=1, groups=1, padding=0, biases=(True, True)):
        super().__init__()
        torch.manual_seed(3)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.before = conv(8, 12, 3, stride, 1)
        self.last = conv(12, 16, kernel, 1, padding, groups=groups, bias=biases[0])
        self.shortcut = conv(8, 16, 1, stride, bias=biases[1])

    def forward(self, x):
        return torch.relu(self.last(torch.relu(self.before(x))) + self.shortcut(x))


class UsedTwice(Sum):
    def forward(self, x):
        shortcut = self.shortcut(x)
        return torch.relu(self.last(self.before(x)) + shortcut) * shortcut


class Result(Sum):
    def forward(self, x):
        shortcut = self.shortcut(x)
        return self.last(self.before(x)) + shortcut, shortcut


class Weighted(Sum):
    def forward(self, x):
        return torch.add(self.last(self.before(x)), self.shortcut(x), alpha=2)


class Doubled(Sum):
    def forward(self, x):
        y = self.shortcut(x)
        return y + y


def run(program, x, dtype=torch.float16):
    weights = cast(program.weights, dtype)
    return Interpreter(in_type(program, str(dtype)[6:]), weights, CPU).run([x.to(dtype)])[0]


@pytest.mark.parametrize(
    ("rank", "stride", "biases"),
    [
        (1, 1, (True, True)),
        (1, 2, (False, False)),
        (2, 1, (True, False)),
        (2, 2, (True, True)),
        (2, 3, (False, True)),
        (3, 1, (False, False)),
        (3, 2, (True, True)),
    ],
)
def test_a_sum_is_one_convolution_with_the_same_answers(rank, stride, biases):
    program = program_of(Sum(rank, stride, biases=biases), INPUTS[rank], precision="fp16")
    joined = join_sums(program)
    convolutions = [node for node in joined.nodes if "conv" in node.op]
    assert len(convolutions) == 2
    assert tuple(joined.weights[convolutions[1].args[1].name].shape[:2]) == (16, 20)
    generator = torch.Generator().manual_seed(rank)
    for height in (8, 13, 17):
        dims = [s if isinstance(s, int) else height for s in program.inputs[0].shape[1:]]
        x = torch.randn(3, *dims, generator=generator).half()
        exact = run(program, x, torch.float64)
        assert torch.allclose(run(joined, x, torch.float64), exact, atol=2e-3)
        error = (run(joined, x).double() - exact).norm() / exact.norm()
        assert error <= 1.5 * (run(program, x).double() - exact).norm() / exact.norm()


def test_its_operations_are_a_segment_and_a_region_on_a_gpu():
    program = program_of(Sum(), IMAGE, precision="fp16")
    joined, found = for_device(program, "cuda")
    described = [site.segment.describe() for site in found.sites]
    assert described == ["conv2d+bias+relu", "conv2d+bias+relu", "slice+slice+cat"]
    assert not found.left
    assert joined.sha256 == program.sha256
    assert joined.notes[-1] == "sums of two 1x1 convolutions joined: 1"
    read = {name for site in found.sites for _, name in site.values}
    assert joined.weights.keys() <= read, "weights that nothing reads any more are gone"
    on_cpu, _ = for_device(program, "cpu")
    assert on_cpu is program


@pytest.mark.parametrize(
    ("module", "precision"),
    [
        (Sum(), "fp32"),
        (Sum(), "tf32"),
        (Sum(kernel=3, padding=1), "fp16"),
        (Sum(stride=1, padding=0, groups=2), "fp16"),
        (UsedTwice(), "fp16"),
        (Result(), "fp16"),
        (Weighted(), "fp16"),
        (Doubled(), "fp16"),
    ],
)
def test_other_sums_stay_as_they_are(module, precision):
    dtype = "FP16" if precision == "fp16" else "FP32"
    program = program_of(module, IMAGE.replace("FP16", dtype), precision=precision)
    assert join_sums(program) is program


def test_biases_that_overflow_together_are_not_joined():
    module = Sum()
    for conv in (module.last, module.shortcut):
        nn.init.constant_(conv.bias, 40000.0)
    program = program_of(module, IMAGE, precision="fp16")
    assert join_sums(program) is program


def test_the_whole_program_is_judged_by_what_was_exported():
    """A joined program with a wrong weight is not its own reference."""
    program = program_of(Sum(), IMAGE, precision="fp16")
    joined = join_sums(program)
    bucket = Bucket.of({"batch": 2, "h": 9})
    cache = cache_of([])
    x = [[torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(n)).half()] for n in (1, 2)]
    for factor, refused in ((1.0, False), (1.01, True)):
        wrong = {name: w * factor if name.endswith("_w") else w for name, w in joined.weights.items()}
        resources = Resources(replace(joined, weights=wrong), partition(joined), CPU, exported=program)
        sized = zip(resources.partition.sites, resources.segment_sizes(bucket), strict=True)
        plans = [cache.reference(site.segment, sizes, "") for site, sizes in sized]
        errors = whole_model.check(resources, Executor(resources, bucket, plans, capture=False), *x)
        assert (errors.ours.rms > 5e-3) is refused

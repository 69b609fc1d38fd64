"""The benchmarks' networks are those of their publications, keep their values in range, and can be served."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from programs import program_of, run_in_torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.networks import NETWORKS
from cudnn_fusion.lowered import Program
from cudnn_fusion.partition import partition

# As published; the U-Net's, whose upsampling is not the publication's, as its layers add up.
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnext50": 25_028_904,
    "unet": 31_384_898,
    "yolo": 61_949_149,
    "convnext_tiny": 28_589_128,
}
# The smallest at which every feature map has elements: a CPU is slow in half precision.
EXPORTED_AT = {"resnet50": 32, "resnext50": 32, "unet": 16, "yolo": 32, "convnext_tiny": 32}


# A trace takes ten seconds: by default each precision meets two, which have all kinds of layers between them,
# and of blocks that repeat there is one.
ALL = os.environ.get("EXPORTED_NETWORKS") == "all"
IN_HALF = list(PARAMETERS) if ALL else ["yolo", "convnext_tiny"]
IN_SINGLE = list(PARAMETERS) if ALL else ["resnext50", "unet"]


@pytest.fixture(scope="module", params=PARAMETERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def network(name: str) -> nn.Module:
    return NETWORKS[name].make()


def shortened(network: nn.Module) -> nn.Module:
    """A copy in which no block follows one of the same type and sizes."""
    network = copy.deepcopy(network)
    for part in list(network.modules()):
        if isinstance(part, nn.Sequential):
            kept: list[nn.Module] = []
            for block in part:
                if not kept or sizes_in(block) != sizes_in(kept[-1]):
                    kept.append(block)
            for _ in range(len(part) - len(kept)):
                del part[-1]
            for index, block in enumerate(kept):
                part[index] = block
    return network


def sizes_in(block: nn.Module) -> list[tuple[object, ...]]:
    """A block's own type, and its weights by name and shape."""
    return [(type(block),), *((name, tensor.shape) for name, tensor in block.state_dict().items())]


@pytest.fixture(scope="module")
def traced(network: nn.Module) -> nn.Module:
    return network if ALL else shortened(network)


def images(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def exported(name: str, network: nn.Module, precision: str, batch: str) -> Program:
    size = EXPORTED_AT[name]
    dtype = {"fp16": "FP16", "fp32": "FP32"}[precision]
    return program_of(network, f"x:{dtype}[{batch},3,{size},{size}]", precision=precision)


def module_answers(network: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return pytree.tree_leaves(network(x))


def test_it_has_as_many_parameters_as_published(name: str, network: nn.Module) -> None:
    assert sum(parameter.numel() for parameter in network.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("one", ["resnet50", "convnext_tiny"])
def test_weights_are_the_same_every_time_with_any_number_of_threads(one: str) -> None:
    threads = torch.get_num_threads()
    made = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            made.append(NETWORKS[one].make().state_dict())
    finally:
        torch.set_num_threads(threads)
    for key, tensor in made[0].items():
        assert torch.equal(tensor, made[1][key]), key


def test_values_neither_vanish_nor_explode(network: nn.Module) -> None:
    assert not network.training
    seen: list[tuple[str, torch.Tensor]] = []
    hooks = [
        part.register_forward_hook(
            lambda _, __, result, path=path: seen.extend((path, x) for x in pytree.tree_leaves(result))
        )
        for path, part in network.named_modules()
    ]
    with torch.inference_mode():
        network(images(2, 96))
    for hook in hooks:
        hook.remove()
    assert len(seen) > 40
    for path, x in seen:
        assert torch.isfinite(x).all(), path
        assert 1e-2 < x.std() < 1e2, path
        assert x.abs().max() < 1e3, path


@pytest.mark.parametrize("name", IN_HALF, indirect=True, scope="module")
def test_exported_in_half_precision_every_convolution_is_fused_and_answers_stay(
    name: str, traced: nn.Module
) -> None:
    program = exported(name, traced, "fp16", "batch=1..32")
    assert program.batch_axis == "batch"
    found = partition(program)
    # In ConvNeXt all linear layers but the head's are 1x1 convolutions of images.
    kinds = (nn.Conv2d, nn.Linear) if name == "convnext_tiny" else (nn.Conv2d,)
    heads = 1 if name == "convnext_tiny" else 0
    assert len(found.sites) == sum(isinstance(part, kinds) for part in traced.modules()) - heads
    assert not [left for left in found.left if "conv" in left.op or "batch_norm" in left.op]
    activations = sum(isinstance(part, nn.ReLU | nn.SiLU) for part in traced.modules())
    fused = [site for site in found.sites if {"relu", "silu"} & {op.kind for op in site.segment.operations}]
    assert len(fused) >= activations
    x = images(2, EXPORTED_AT[name])
    for answer, expected in zip(run_in_torch(program, x.half()), module_answers(traced, x), strict=True):
        assert (answer.float() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("name", IN_SINGLE, indirect=True, scope="module")
def test_exported_in_single_precision_it_computes_what_the_network_does(name: str, traced: nn.Module) -> None:
    # A fixed batch is traced in half the time.
    program = exported(name, traced, "fp32", "2")
    x = images(2, EXPORTED_AT[name])
    for found, expected in zip(run_in_torch(program, x), module_answers(traced, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))

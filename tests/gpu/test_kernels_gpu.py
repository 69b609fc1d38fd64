"""This project's own kernels: every candidate of each, against float64."""

import pytest
import torch
from torch import nn

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.engines.depthwise import DepthwiseEngine
from cudnn_fusion.engines.stem import StemEngine
from cudnn_fusion.evaluate import evaluate
from cudnn_fusion.partition import partition
from cudnn_fusion.program import export_program
from cudnn_fusion.segment import OUTPUT, empty, per_channel_dims, to_layout

POOL = nn.MaxPool2d(3, 2, 1)
BOUNDS = {"fp32": 2e-6, "fp16": 5e-4, "bf16": 4e-3}
STEMS = {
    "ResNet's": ((3, 224, 224), (nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), POOL)),
    "YOLO's": ((3, 160, 192), (nn.Conv2d(3, 32, 3, 1, 1), nn.SiLU())),
    "ConvNeXt's": ((3, 224, 224), (nn.Conv2d(3, 96, 4, 4),)),
    "U-Net's": ((3, 99, 131), (nn.Conv2d(3, 64, 3, 1, 1), nn.ReLU())),
    "AlexNet's": ((3, 227, 227), (nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2))),
    "spectrogram": ((1, 61, 77), (nn.Conv2d(1, 48, (5, 3), (2, 1), (2, 1)), nn.GELU(), POOL)),
    "8 channels, dilated": ((2, 40, 51), (nn.Conv2d(2, 8, 3, (1, 3), (0, 2), (2, 1)), nn.Tanh())),
    "256 channels": ((4, 19, 19), (nn.Conv2d(4, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2))),
}
DEPTHWISE = {
    "ConvNeXt's": ((96, 28, 28), (nn.Conv2d(96, 96, 7, 1, 3, groups=96),)),
    "MobileNet's": ((33, 29, 31), (nn.Conv2d(33, 33, 3, 2, 1, groups=33), nn.Hardswish())),
}


def check(engine, dims, layers, precision, batch=3):
    torch.manual_seed(7)
    declaration = InputDeclaration.parse(f"x:{precision.upper()}[batch=1..8,{','.join(map(str, dims))}]")
    program = export_program(nn.Sequential(*layers).eval(), [declaration], precision)[1]
    (site,) = partition(program, with_regions=True).sites
    segment = site.segment
    operands = {}
    for operand in segment.inputs:
        if operand.role == "weight":
            value = program.weights[site.value(operand.name)].cuda()
            if segment.is_per_channel(operand.name):
                value = value.reshape(per_channel_dims(value.numel(), 4))
        else:
            value = torch.randn(batch, *dims, device="cuda").to(getattr(torch, operand.dtype))
        operands[operand.name] = to_layout(value, operand.layout)
    sizes = {name: tuple(value.shape) for name, value in operands.items()}
    sizes[OUTPUT] = segment.output_dims(sizes)
    exact = evaluate(segment.operations, {name: value.double() for name, value in operands.items()})
    candidates = engine.candidates(segment, sizes)
    assert candidates
    for candidate in candidates:
        built = engine.build(segment, sizes, candidate)
        plan = engine.load(segment, sizes, built.candidate, built.blob, built.workspace_bytes)
        prepared = plan.prepare(operands)
        out = empty(sizes[OUTPUT], "channels_last", operands["x"].dtype, torch.device("cuda"))
        for _ in range(3):
            plan.run(prepared, None, out.fill_(float("nan")))
        error = (out.double() - exact).norm() / exact.norm()
        assert error < BOUNDS[precision], (candidate.label(), error)
    print(f"{segment.describe()} {precision}: {len(candidates)} candidates are right")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", STEMS)
def test_first_convolutions(name, precision):
    check(StemEngine(torch.device("cuda", 0)), *STEMS[name], precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_convolutions(name, precision):
    check(DepthwiseEngine(torch.device("cuda", 0)), *DEPTHWISE[name], precision)

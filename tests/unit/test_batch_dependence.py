"""Rows of different clients are joined only where no operation lets them influence each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.program import export_program


class Model(nn.Module):
    """``function(layer, x)``."""

    def __init__(self, function, layer):
        super().__init__()
        self.function = function
        self.layer = layer

    def forward(self, x):
        return self.function(self.layer, x)


def batch_axis(function, layer=None):
    model = Model(function, layer or nn.Conv2d(4, 4, 3, padding=1)).eval()
    program = export_program(model, [InputDeclaration.parse("x:FP32[batch=1..64,4,8,8]")], "fp32")[1]
    return program.batch_axis, program.notes[-1]


MIXING = {
    "a threshold on the batch's maximum": lambda c, x: c(torch.where(x.max() > 1.5, x / 255, x)),
    "a scale that acts on large values alone": lambda c, x: c(x / x.abs().amax().clamp(min=100)),
    "a minimum over all": lambda c, x: c(x) * (x.amin() > -50),
    "the number of rows": lambda c, x: c(x) * (1 + x.shape[0] // 16),
    "the row eight before": lambda c, x: c(x + F.pad(x, (0, 0, 0, 0, 0, 0, 8, 0))[: x.shape[0]]),
    "softmax over rows": lambda c, x: torch.softmax(c(x), 0),
    "a sum so far": lambda c, x: torch.cumsum(c(x), 0),
    "reversed rows": lambda c, x: torch.flip(c(x), [0]),
    "rolled rows": lambda c, x: torch.roll(c(x), 1, 0),
    "rolled everything": lambda c, x: torch.roll(c(x), 1),
    "sorted rows": lambda c, x: torch.sort(c(x), 0)[0],
    "similarities between rows": lambda c, x: (x.flatten(1) @ x.flatten(1).T) @ x.flatten(1),
    "the batch's mean": lambda c, x: c(x - x.mean(0, keepdim=True)),
    "a row's place": lambda c, x: c(x) * torch.arange(x.shape[0])[:, None, None, None],
}


@pytest.mark.parametrize("name", MIXING)
def test_a_program_that_mixes_rows_has_no_batch_axis(name):
    axis, why = batch_axis(MIXING[name])
    assert axis is None
    assert "no batch axis" in why


APART = {
    "softmax over channels": (lambda c, x: torch.softmax(c(x), 1), None),
    "a statistic of each row": (lambda c, x: c(x - x.amax((1, 2, 3), keepdim=True)), None),
    "attention": (
        lambda c, x: F.scaled_dot_product_attention(x.flatten(2), x.flatten(2), x.flatten(2)),
        None,
    ),
    "multi-head attention": (
        lambda m, x: m(*[x.flatten(2).transpose(1, 2)] * 3, need_weights=False)[0],
        nn.MultiheadAttention(4, 2, batch_first=True),
    ),
    "group norm": (lambda g, x: g(x), nn.GroupNorm(2, 4)),
    "instance norm": (lambda g, x: g(x), nn.InstanceNorm2d(4)),
    "layer norm": (lambda n, x: n(x.flatten(1)), nn.LayerNorm(256)),
    "a sequence of each row": (lambda m, x: m(x.flatten(2))[0], nn.LSTM(64, 8, batch_first=True)),
    "channels joined and parted": (lambda c, x: torch.cat([*c(x).chunk(2, 1)[::-1], x], 1), None),
    "rolled image": (lambda c, x: torch.roll(c(x), 2, 3), None),
    "mirrored image": (lambda c, x: torch.flip(c(x), [3]), None),
    "a class token": (
        lambda c, x: torch.cat([torch.ones(1, 1, 64).expand(x.shape[0], -1, -1), c(x).flatten(2)], 1),
        None,
    ),
    "rows times places and back": (
        lambda c, x: c(x).permute(0, 2, 3, 1).reshape(-1, 4).sigmoid().view(x.shape[0], 8, 8, 4),
        None,
    ),
    "the best of each row": (lambda c, x: c(x).flatten(1).topk(3)[0], None),
    "upsampling": (lambda c, x: F.interpolate(c(x), scale_factor=2), None),
}


@pytest.mark.parametrize("name", APART)
def test_a_program_that_keeps_rows_apart_has_one(name):
    axis, why = batch_axis(*APART[name])
    assert axis == "batch", why

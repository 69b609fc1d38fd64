"""A small network with one of each thing that a program can hold: the model of the serving tests."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16
HEIGHTS = (16, 64)
LARGEST_BATCH = 64
INPUTS = (
    f"image:FP32[batch=1..{LARGEST_BATCH},3,height={HEIGHTS[0]}..{HEIGHTS[1]},{WIDTH}]",
    f"scale:FP32[batch=1..{LARGEST_BATCH},4]",
)
"""Declarations for tools/export.py. FP32 in every precision: a half-precision program takes them so too."""


class SmallNet(nn.Module):
    """Image [N,3,H,16] and a scale for every row [N,4] to ``profile`` [N,H/4,16] and ``scores`` [N,4,2].

    Convolutions: padded on two sides only and followed by batch norm, with residual and relu, with silu, in
    groups; batch norm behind a relu, max-pooling, permuting and flattening, a linear layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, bias=False)
        self.stem_norm = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.smooth = nn.Conv2d(16, 16, 1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.late_norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 8)

    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.stem_norm(self.stem(F.pad(image, (0, 1, 0, 1)))))
        x = F.relu(self.inner(x) + x)
        x = F.silu(self.smooth(x))
        x = self.late_norm(F.relu(self.grouped(x)))
        x = F.max_pool2d(x, 2)
        features = x.amax((2, 3), keepdim=True).flatten(1)
        scores = self.head(features).view(-1, 4, 2) * scale[:, :, None]
        return {"profile": x.mean(3).permute(0, 2, 1), "scores": scores}


def small_net() -> SmallNet:
    """The network with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module = SmallNet()
        for norm in (module.stem_norm, module.late_norm):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    return module.eval()


# Made once: making one uses torch's global generator, which threads share.
_REFERENCE = small_net()


def inputs(batch: int, height: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """Input arrays by name; other seeds give other values."""
    random = np.random.default_rng((seed, batch, height))
    return {
        "image": random.standard_normal((batch, 3, height, WIDTH), dtype=np.float32),
        "scale": random.uniform(0.5, 2, (batch, 4)).astype(np.float32),
    }


def expected(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What PyTorch answers to `inputs`."""
    with torch.inference_mode():
        outputs = _REFERENCE(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    return {name: output.numpy() for name, output in outputs.items()}

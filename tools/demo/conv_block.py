"""The smallest example: one convolution with bias and relu, which is one fused operation.

    python tools/export.py --model tools.demo.conv_block:conv_block --precision fp16 \\
        --input "image:FP16[batch=1..64,64,56,56]" --out model_repository/conv_block
"""

from __future__ import annotations

import torch
from torch import nn


class ConvBlock(nn.Module):
    """3x3 convolution, 64 to 64 channels, padding 1, bias, relu: [N,64,H,W] to [N,64,H,W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # Values near those of a trained network's: activations keep their size.
            self.conv.weight.normal_(0, (2 / (64 * 9)) ** 0.5, generator=generator)
            assert self.conv.bias is not None
            self.conv.bias.normal_(0, 0.1, generator=generator)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(image))


def conv_block() -> ConvBlock:
    """The block with the same weights every time."""
    return ConvBlock().eval()

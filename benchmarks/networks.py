"""Convolutional networks to measure, from their publications, with random weights that act like trained ones.

Every factory gives the same weights each time, in inference mode and float32. Convolutions are drawn after
He et al. (2015). Batch norms get the statistics of what reaches them: one forward pass in float64 over noise,
whose result does not depend on the number of threads once it is rounded to float32. So activations keep their
size through the whole network, in half precision too, and batch norms do what they do after training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tools.demo.conv_block import conv_block
from tools.demo.crepe import crepe_tiny

# What the last norm of a residual branch multiplies with: a sum of many branches grows slowly.
_BRANCH_GAIN = 0.25


@dataclass(frozen=True)
class Network:
    """A network to measure: how to make it, and its input without the batch."""

    make: Callable[[], nn.Module]
    dims: tuple[int, ...]


class ConvNorm(nn.Module):
    """Convolution that keeps the size (divided by ``stride``), batch norm, activation if any.

    The batch norm's scales are drawn around ``gain``.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: type[nn.Module] | None = nn.ReLU,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        padding = (kernel - 1) // 2
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        self.activation = activation() if activation else nn.Identity()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.norm(self.conv(x)))
        return result


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride and the groups), 1x1; plus the input, projected where its size changes."""

    def __init__(self, channels_in: int, width: int, channels_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            ConvNorm(channels_in, width, 1),
            ConvNorm(width, width, 3, stride=stride, groups=groups),
            ConvNorm(width, channels_out, 1, activation=None, gain=_BRANCH_GAIN),
        )
        same_size = stride == 1 and channels_in == channels_out
        self.shortcut = (
            nn.Identity()
            if same_size
            else ConvNorm(channels_in, channels_out, 1, stride=stride, activation=None)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [N,3,224,224] to 1000 classes [N,1000], 50 layers.

    He, Zhang, Ren, Sun, 2015, with the stride in the 3x3 convolution; with groups: Xie, Girshick, Dollár, Tu,
    He, 2016. ``width`` is that of the first stage's 3x3 convolutions.
    """

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 64, 7, stride=2)
        blocks: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                channels_out = 256 << stage
                blocks.append(Bottleneck(channels, width << stage, channels_out, stride, groups))
                channels = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, padding=1)
        x = F.adaptive_avg_pool2d(self.blocks(x), 1)
        result: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return result


def _two_convs(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(channels_in, channels_out, 3), ConvNorm(channels_out, channels_out, 3))


class UNet(nn.Module):
    """Images [N,3,H,W], H and W multiples of 16, to a mask of two classes [N,2,H,W].

    Ronneberger, Fischer, Brox, 2015, with padded convolutions, batch norm, and nearest upsampling in place of
    transposed convolutions.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        channels = (3, *widths)
        self.down = nn.ModuleList([_two_convs(channels[i], channels[i + 1]) for i in range(len(widths))])
        self.up = nn.ModuleList([_two_convs(width + 2 * width, width) for width in widths[-2::-1]])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = [self.down[0](x)]
        for level in self.down[1:]:
            skipped.append(level(F.max_pool2d(skipped[-1], 2)))
        x = skipped.pop()
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = level(torch.cat([skipped.pop(), x], 1))
        result: torch.Tensor = self.head(x)
        return result


def _silu(channels_in: int, channels_out: int, kernel: int, stride: int = 1, gain: float = 1.0) -> ConvNorm:
    return ConvNorm(channels_in, channels_out, kernel, stride=stride, activation=nn.SiLU, gain=gain)


def _alternating(channels_in: int, width: int, convs: int) -> list[nn.Module]:
    """1x1 to ``width`` and 3x3 to twice that, in turn; an odd number of them ends at ``width``."""
    layers: list[nn.Module] = []
    for number in range(convs):
        kernel, channels = (3, 2 * width) if number % 2 else (1, width)
        layers.append(_silu(channels_in, channels, kernel))
        channels_in = channels
    return layers


class DarknetBlock(nn.Module):
    """1x1 to half the channels, 3x3 back; plus the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _silu(channels, channels // 2, 1), _silu(channels // 2, channels, 3, gain=_BRANCH_GAIN)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.branch(x)
        return result


class Yolo(nn.Module):
    """Images [N,3,H,W], H and W multiples of 32, to boxes at three scales [N,255,H/s,W/s], s = 8, 16, 32.

    YOLOv3 (Redmon, Farhadi, 2018) with silu, as its successors have it, in place of leaky relu. 255 is three
    anchors of 4 coordinates, objectness and 80 classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _silu(3, 32, 3)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(
                    _silu(32 << stage, 64 << stage, 3, stride=2),
                    *(DarknetBlock(64 << stage) for _ in range(count)),
                )
                for stage, count in enumerate((1, 2, 8, 8, 4))
            ]
        )
        self.necks = nn.ModuleList(
            [
                nn.Sequential(*_alternating(1024, 512, 5)),
                nn.Sequential(*_alternating(512 + 256, 256, 5)),
                nn.Sequential(*_alternating(256 + 128, 128, 5)),
            ]
        )
        self.laterals = nn.ModuleList([_silu(512, 256, 1), _silu(256, 128, 1)])
        self.heads = nn.ModuleList(
            [
                nn.Sequential(_silu(width, 2 * width, 3), nn.Conv2d(2 * width, 255, 1))
                for width in (512, 256, 128)
            ]
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        seen = []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        coarse = self.necks[0](seen[4])
        middle = self.necks[1](torch.cat([_twice(self.laterals[0](coarse)), seen[3]], 1))
        fine = self.necks[2](torch.cat([_twice(self.laterals[1](middle)), seen[2]], 1))
        return self.heads[2](fine), self.heads[1](middle), self.heads[0](coarse)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [N,C,H,W]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """7x7 depthwise, and along channels: layer norm, linear to four times as many, gelu, linear back, scale;
    plus the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.contract = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.empty(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        branch = self.scale * self.contract(F.gelu(self.expand(branch)))
        result: torch.Tensor = x + branch.permute(0, 3, 1, 2)
        return result


class ConvNext(nn.Module):
    """Images [N,3,224,224] to 1000 classes [N,1000]: ConvNeXt-T (Liu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (96, 192, 384, 768)
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0], eps=1e-6)]
        for stage, count in enumerate((3, 3, 9, 3)):
            if stage > 0:
                before = widths[stage - 1]
                layers += [ChannelNorm(before, eps=1e-6), nn.Conv2d(before, widths[stage], 2, 2)]
            layers += [ConvNextBlock(widths[stage]) for _ in range(count)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.classifier = nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classifier(self.norm(self.layers(x).mean((2, 3))))
        return result


def resnet50() -> nn.Module:
    """ResNet-50 for images [N,3,224,224]."""
    return _with_weights(lambda: ResNet(width=64, groups=1), calibrated_at=224)


def resnext50() -> nn.Module:
    """ResNeXt-50 32x4d for images [N,3,224,224]."""
    return _with_weights(lambda: ResNet(width=128, groups=32), calibrated_at=224)


def unet() -> nn.Module:
    """U-Net for images [N,3,256,256]."""
    return _with_weights(UNet, calibrated_at=96)


def yolo() -> nn.Module:
    """YOLOv3-like detector for images [N,3,416,416]."""
    return _with_weights(Yolo, calibrated_at=224)


def convnext_tiny() -> nn.Module:
    """ConvNeXt-T for images [N,3,224,224]."""
    return _with_weights(ConvNext, calibrated_at=None)


NETWORKS: Mapping[str, Network] = {
    "resnet50": Network(resnet50, (3, 224, 224)),
    "resnext50": Network(resnext50, (3, 224, 224)),
    "unet": Network(unet, (3, 256, 256)),
    "yolo": Network(yolo, (3, 416, 416)),
    "convnext_tiny": Network(convnext_tiny, (3, 224, 224)),
    "crepe": Network(crepe_tiny, (1024,)),
    "conv_block": Network(conv_block, (64, 56, 56)),
}


def _with_weights(make: Callable[[], nn.Module], calibrated_at: int | None) -> nn.Module:
    """The module with weights; batch norms, where there are any, are calibrated on an image of this size.

    Nothing is drawn from torch's global generator.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for part in module.modules():
            _draw(part, generator)
        for part in module.modules():
            if isinstance(part, ConvNorm):
                part.norm.weight.mul_(part.gain)
        if calibrated_at is not None:
            image = torch.randn(1, 3, calibrated_at, calibrated_at, generator=generator)
            _calibrate(module, image)
    return module.eval()


def _draw(part: nn.Module, generator: torch.Generator) -> None:
    """Draws the part's own weights, not its children's."""
    if isinstance(part, nn.Conv2d | nn.Linear):
        part.weight.normal_(0, (2 / part.weight[0].numel()) ** 0.5, generator=generator)
        if part.bias is not None:
            part.bias.normal_(0, 0.1, generator=generator)
    elif isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
        part.weight.uniform_(0.5, 1.5, generator=generator)
        part.bias.normal_(0, 0.2, generator=generator)
    elif isinstance(part, ConvNextBlock):
        part.scale.uniform_(0.5 * _BRANCH_GAIN, 1.5 * _BRANCH_GAIN, generator=generator)


def _calibrate(module: nn.Module, image: torch.Tensor) -> None:
    """Sets the statistics of all batch norms to those that they see for ``image``."""
    module.double().train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
            # The plain average over all passes, of which there is one.
            part.momentum = None
    module(image.double())
    module.float()

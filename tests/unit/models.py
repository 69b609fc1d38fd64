"""Small models for tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


def _with_statistics(module: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every batch norm statistics and affine parameters that an untrained one does not have."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.running_mean = torch.randn(part.num_features, generator=generator)
            part.running_var = torch.rand(part.num_features, generator=generator) + 0.3
            if part.affine:
                part.weight.data = torch.randn(part.num_features, generator=generator)
                part.bias.data = torch.randn(part.num_features, generator=generator)
    return module.eval()


class ConvNet(nn.Module):
    """conv, batch norm, relu twice, pooled and flattened through a view, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, stride=2)
        self.second_norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6 * 3 * 3, 5)
        _with_statistics(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.first_norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)))
        x = F.adaptive_avg_pool2d(x, (3, 3))
        return self.last(torch.flatten(x, 1))


class NormAfterRelu(nn.Module):
    """conv, relu, batch norm, zero-padded conv: the batch norm fits into neither convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        _with_statistics(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(F.relu(self.first(x))))


class NormOfSharedConv(nn.Module):
    """The convolution's result is also used beside its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        _with_statistics(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Residual(nn.Module):
    """A residual block whose addition is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        _with_statistics(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return F.relu(y, inplace=True)


class SamePadding(nn.Module):
    """An even kernel with padding='same' (one more after than before), then padding='valid'."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2))
        self.valid = nn.Conv2d(4, 4, 3, padding="valid")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.valid(F.pad(self.same(x), (1, 0)))


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class SeveralOutputs(nn.Module):
    """Two inputs; a dictionary with a tuple, a named tuple and None inside."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, object]:
        total = left + right
        return {
            "total": total,
            "parts": (left * 2, [right.neg()]),
            "pair": Pair(total.clamp(max=0), total.clamp(min=0)),
            "nothing": None,
        }


class Reordered(nn.Module):
    """permute, flatten, view and unflatten between channels-last convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.next = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        n, c, h, w = y.shape
        tokens = y.view(n, c, h * w).transpose(1, 2)
        back = tokens.permute(0, 2, 1).unflatten(2, (h, w))
        z = self.next(back)
        return z.flatten(1), tokens, torch.view_as_real(torch.view_as_complex(y.view(n, c, h * w // 2, 2)))


class InPlaceOnInput(nn.Module):
    """Writes into its input and returns it, a weight, and the same value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        y = x.clone()
        y[:, 0] = 7
        return x, self.weight, y, y, torch.relu(x).detach()


class BatchMean(nn.Module):
    """Subtracts the mean over the batch: rows depend on each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class Masked(nn.Module):
    """A constant of minus infinity and one lifted from forward()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x < 0, float("-inf")).softmax(-1) * torch.tensor([1.0, 2.0, 3.0])


class DecidesByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class LoopsByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.norm() > 1:
            x = x / 2
        return x


class CutsByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(x[0].argmax())]


class Tokens(nn.Module):
    """An embedding under a mask, with an optional third input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        return (hidden if scale is None else hidden * scale).mean(1)


class ChoosesByValue(nn.Module):
    """The same with torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.linear, lambda a: a - 1, (x,))


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


class StaysInTraining(nn.Module):
    def train(self, mode: bool = True) -> StaysInTraining:
        return super().train(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, training=self.training)


class TiedWeights(nn.Module):
    """Two layers that share one weight, which is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.first.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).t())
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class TwoSizes(nn.Module):
    """Dynamic height and width: stride, pooling, interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.max_pool2d(self.conv(x), 3, 2, 1)
        return y, F.interpolate(y, scale_factor=2.0, mode="nearest")

"""A recurrent network over sequences first, as `nn.LSTM` is by default: [T, B, F] inside, labels of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Reader(nn.Module):
    """Classifies sequences [B, T, F] by the last hidden state of two recurrent layers."""

    def __init__(self, features: int = 3, hidden: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, F] -> scores [B, classes]."""
        steps, _ = self.lstm(x.transpose(0, 1))
        steps = self.norm(steps)
        scores: Tensor = self.head(steps[-1])
        return scores


class Waves(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Noisy waves [length, 3]; the label is the frequency."""

    classes = ("slow", "steady", "fast", "hurried")

    def __init__(self, count: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % len(self.classes)
        time = torch.linspace(0, 3, length)
        waves = torch.sin(time * (1.0 + self.labels[:, None]))
        self.series = waves[:, :, None] * torch.tensor([1.0, 0.5, -1.0])
        self.series = self.series + 0.1 * torch.randn(count, length, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.series[index], int(self.labels[index])


def build(hidden: int = 8) -> nn.Module:
    """The model."""
    return Reader(hidden=hidden)


def data(split: str, length: int = 6, count: int = 24) -> Waves:
    """The waves of a split."""
    return Waves(count if split == "train" else 10, length, seed=1 if split == "train" else 2)

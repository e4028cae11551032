"""A masked language model: scores [B, T, V], and targets [B, T] that are -100 where nothing was masked."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0
MASK = 1
FIRST = 2
"""The ids of padding, of the mask, and of the first word."""


class MaskedModel(nn.Module):
    """Two layers of `nn.TransformerEncoderLayer`, without dropout."""

    def __init__(self, words: int = 16, width: int = 12, length: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 3, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] and [B, T], 1 where there is a word -> scores [B, T, V]."""
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        scores: Tensor = self.head(x)
        return scores


class Counting(torch.utils.data.Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Ascending sequences of up to 8 words with two of them masked."""

    def __init__(self, count: int, seed: int, length: int = 8, words: int = 16) -> None:
        self.count, self.seed, self.length, self.words = count, seed, length, words

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        size = self.length - index % 3
        start = int(torch.randint(0, self.words - FIRST, (), generator=generator))
        ids = torch.full((self.length,), PAD)
        ids[:size] = FIRST + (start + torch.arange(size)) % (self.words - FIRST)
        masked = torch.randperm(size, generator=generator)[:2]
        target = torch.full((self.length,), -100)
        target[masked] = ids[masked]
        there = (ids != PAD).long()
        ids[masked] = MASK
        return {"input_ids": ids, "attention_mask": there}, target


def build(width: int = 12) -> nn.Module:
    """The model."""
    return MaskedModel(width=width)


def data(split: str, count: int = 24) -> Counting:
    """The sequences of a split."""
    return Counting(count if split == "train" else 10, seed=1 if split == "train" else 2)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the masked words."""
    return F.cross_entropy(output.transpose(1, 2), target)


def found(output: Tensor, target: Tensor) -> Tensor:
    """The share of the masked words that are found."""
    asked = target != -100
    return (output.argmax(-1) == target)[asked].float().mean()

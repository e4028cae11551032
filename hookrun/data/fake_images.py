"""Generated images of any shape: noise with random labels, for trials without a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples
from hookrun.data.source import Generated

Side = Annotated[int, Field(ge=1, le=2**14)]


class FakeImages(Generated):
    """Images uniform in 0..1, each drawn from a seed of its own: sample i is always the same.

    shape:       [C, H, W] of an image
    num_classes: the number of labels
    """

    name = "fake_images"
    train_size: int = Field(default=1000, ge=0, le=10**9)
    val_size: int = Field(default=200, ge=0, le=10**9)
    shape: list[Side] = Field(default=[3, 64, 64], min_length=3, max_length=3)
    num_classes: int = Field(default=10, ge=1, le=2**20)

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        self.size(split)
        return DataInfo(
            name=self.name,
            inputs=TensorInfo(tuple(self.shape), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=self.num_classes,
            sizes=self.sizes,
        )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        self.size(split)
        return _DrawnImages(self, split, seed)


class _DrawnImages(Samples):
    def __init__(self, drawn: FakeImages, split: Split, seed: int) -> None:
        self._drawn = drawn
        self._split = split
        self._seed = seed

    def __len__(self) -> int:
        return self._drawn.size(self._split)

    def __getitem__(self, index: int) -> Sample:
        number = range(len(self))[index]  # as in a list: negative counts from the end, past it IndexError
        generator = self._drawn.generator(self._split, self._seed, number)
        image = torch.rand(tuple(self._drawn.shape), generator=generator)
        return image, torch.randint(self._drawn.num_classes, (), generator=generator)

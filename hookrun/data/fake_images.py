"""Generated images of any shape: noise with random labels, for trials without a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from hookrun.config.validation import Args
from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples
from hookrun.data.source import Source, generator_of
from hookrun.errors import Problem, SpecError

Side = Annotated[int, Field(ge=1, le=2**14)]


class FakeImagesArgs(Args):
    """Sizes of the splits, shape [C, H, W] of an image, number of labels; seed null: the experiment's."""

    train_size: int = Field(default=1000, ge=0, le=10**9)
    val_size: int = Field(default=200, ge=0, le=10**9)
    shape: list[Side] = Field(default=[3, 64, 64], min_length=3, max_length=3)
    num_classes: int = Field(default=10, ge=1, le=2**20)
    seed: int | None = Field(default=0, ge=0, lt=2**63)

    def size(self, split: Split) -> int:
        """The number of samples of a split."""
        return self.train_size if split == "train" else self.val_size


class FakeImages(Source[FakeImagesArgs]):
    """Images uniform in 0..1, each drawn from a seed of its own: sample i is always the same."""

    args = FakeImagesArgs

    def inspect(self, root: Path | None, args: FakeImagesArgs, split: Split) -> DataInfo:
        if args.size(split) == 0:
            what = f"the split '{split}' has no samples"
            raise SpecError([Problem(f"data.args.{split}_size", what, f"set data.args.{split}_size")])
        return DataInfo(
            name=self.name,
            inputs=TensorInfo(tuple(args.shape), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=args.num_classes,
            sizes={"train": args.train_size, "val": args.val_size},
        )

    def open(self, root: Path | None, args: FakeImagesArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        return _Generated(args, split, seed if args.seed is None else args.seed)


class _Generated(Samples):
    def __init__(self, args: FakeImagesArgs, split: Split, seed: int) -> None:
        self._size = args.size(split)
        self._shape = tuple(args.shape)
        self._num_classes = args.num_classes
        self._stream = f"{seed}/{split}"

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        number = range(self._size)[index]  # as in a list: negative counts from the end, past it IndexError
        generator = generator_of(f"{self._stream}/{number}")
        image = torch.rand(self._shape, generator=generator)
        return image, torch.randint(self._num_classes, (), generator=generator)


FAKE_IMAGES = FakeImages("fake_images")

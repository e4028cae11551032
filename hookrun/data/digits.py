"""scikit-learn's bundled digits: 1,797 images of 8x8 pixels of handwritten digits, installed with it."""

from __future__ import annotations

from pathlib import Path

import torch

from hookrun.arguments import Args
from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.samples import Samples, TensorSamples
from hookrun.data.source import Source
from hookrun.data.split import stratified_indices

VAL_FRACTION = 0.2


class DigitsArgs(Args):
    """It takes no arguments."""


class Digits(Source[DigitsArgs]):
    """Float [1, 8, 8] images in 0..1 with an integer label; a fixed fifth of each class is for validation."""

    args = DigitsArgs

    def inspect(self, root: Path | None, args: DigitsArgs, split: Split) -> DataInfo:
        return DataInfo(
            name=self.name,
            inputs=TensorInfo((1, 8, 8), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=10,
            sizes={"train": 1438, "val": 359},
        )

    def open(self, root: Path | None, args: DigitsArgs, split: Split, seed: int) -> Samples:
        from sklearn.datasets import load_digits

        digits = load_digits()
        train, val = stratified_indices(digits.target.tolist(), VAL_FRACTION)
        rows = train if split == "train" else val
        images = torch.from_numpy(digits.images[rows]).to(torch.float32).div_(16)  # 16 grey levels
        return TensorSamples(images.unsqueeze(1), torch.from_numpy(digits.target[rows]).to(torch.int64))


DIGITS = Digits("digits")

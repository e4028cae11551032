"""scikit-learn's bundled digits: 1,797 images of 8x8 pixels of handwritten digits, installed with it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookrun.data.info import DataInfo, Split, TensorInfo
from hookrun.data.samples import Samples, TensorSamples
from hookrun.data.source import Source, stratified_part

VAL_FRACTION = 0.2

_FILE = "datasets/data/digits.csv.gz"
_ROWS = 1797
_PIXELS = 64


class Digits(Source):
    """Float [1, 8, 8] images in 0..1 with an integer label; a fixed fifth of each class is for validation."""

    name = "digits"

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        return DataInfo(
            name=self.name,
            inputs=TensorInfo((1, 8, 8), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=10,
            sizes={"train": 1438, "val": 359},
        )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        images, labels = _read()
        rows = stratified_part(labels.tolist(), VAL_FRACTION, split)
        grey = torch.from_numpy(images[rows]).to(torch.float32).div_(16)  # 16 grey levels
        return TensorSamples(grey.view(-1, 1, 8, 8), torch.from_numpy(labels[rows]))


@cache
def _read() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Pixels [1797, 64] in 0..16 and labels [1797], read once in a process.

    The file is read without importing scikit-learn, whose import takes half as long as torch's. If a version of it
    has the file elsewhere or in another form, scikit-learn's own function reads it.
    """
    installed = find_spec("sklearn")
    path = None if installed is None or installed.origin is None else Path(installed.origin).parent / _FILE
    table = np.loadtxt(path, delimiter=",") if path is not None and path.is_file() else None
    if table is None or table.shape != (_ROWS, _PIXELS + 1):
        from sklearn.datasets import load_digits

        digits = load_digits()
        table = np.column_stack([digits.data, digits.target])
    return table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)

"""Small data sets on disk, in the formats of the real ones."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

WriteImages = Callable[..., None]


def write_idx(path: Path, array: np.ndarray) -> None:
    """An IDX file of bytes: two zeros, 8 for uint8, the number of dimensions, each size, the values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def idx() -> Callable[[Path, np.ndarray], None]:
    """Writes an IDX file."""
    return write_idx


@pytest.fixture
def mnist_root(tmp_path: Path) -> Path:
    """Six training and four test images for MNIST and FashionMNIST; image i is of grey level i, its label i."""
    for name in ("MNIST", "FashionMNIST"):
        for prefix, count in (("train", 6), ("t10k", 4)):
            levels = np.arange(count)
            images = np.broadcast_to(levels[:, None, None], (count, 28, 28))
            write_idx(tmp_path / name / "raw" / f"{prefix}-images-idx3-ubyte", images)
            write_idx(tmp_path / name / "raw" / f"{prefix}-labels-idx1-ubyte", levels)
    return tmp_path


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two images in each batch of CIFAR10 and CIFAR100, as pickled by their authors, and torchvision told their sums.

    Image i of a batch is red of level i; its label is i.
    """
    pixels = np.zeros((2, 3, 32, 32), dtype=np.uint8)
    pixels[1, 0] = 255
    for cls, labels, names in (
        (datasets.CIFAR10, "labels", "label_names"),
        (datasets.CIFAR100, "fine_labels", "fine_label_names"),
    ):
        folder = tmp_path / cls.base_folder
        folder.mkdir()

        def write(file: str, content: dict[str, object], folder: Path = folder) -> str:
            data = pickle.dumps(content)
            (folder / file).write_bytes(data)
            return hashlib.md5(data, usedforsecurity=False).hexdigest()

        batch = {"data": pixels.reshape(2, -1), labels: [0, 1]}
        for part in ("train_list", "test_list"):
            sums = [[file, write(file, batch)] for file, _ in getattr(cls, part)]
            monkeypatch.setattr(cls, part, sums)
        meta = write(cls.meta["filename"], {names: ["a", "b"]})
        monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": meta})
    return tmp_path


@pytest.fixture
def write_images() -> WriteImages:
    """Writes PNG files into the folder: image i is (8 + i) pixels wide, 8 high, of grey level i."""

    def write(folder: Path, count: int = 1) -> None:
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8 + i, 8), (i, i, i)).save(folder / f"{i:03}.png")

    return write

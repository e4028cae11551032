"""MNIST, FashionMNIST, CIFAR10 and CIFAR100: found where torchvision puts them, or downloaded by it on request."""

from __future__ import annotations

import math
import socket
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from hookrun.arguments import Args
from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Samples, TensorSamples, Transformed, unit_float
from hookrun.data.source import Source, require_root
from hookrun.errors import Problem, SpecError

_CONNECT_TIMEOUT = 30.0  # seconds; a network that drops packets would keep a download waiting for minutes


class DownloadArgs(Args):
    """download: let torchvision fetch the files into data.root where they are not there yet."""

    download: bool = False


@dataclass(frozen=True)
class _TorchvisionSet(Source[DownloadArgs]):
    """A data set that torchvision holds in memory; images become float [C, H, W] in 0..1."""

    args = DownloadArgs
    cls: Any
    num_classes: int

    @property
    @abstractmethod
    def folder(self) -> str:
        """The folder below the root that holds the files."""

    @property
    @abstractmethod
    def files(self) -> Sequence[str]:
        """The names of the files in it."""

    @abstractmethod
    def sizes_and_shape(self, folder: Path | None) -> tuple[dict[Split, int], tuple[int, ...]]:
        """Samples in each split and the shape of one; those that will be downloaded where there is no folder."""

    @abstractmethod
    def rows(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """The uint8 images [N, C, H, W] and the int64 labels [N] of an opened data set."""

    @property
    def elsewhere(self) -> str:
        """How to get the data on a machine that has a network, and use it on this one."""
        name = self.cls.__name__
        command = f"python -c \"from torchvision.datasets import {name}; {name}('DIR', download=True)\""
        return f"on a machine with a network run {command}, bring DIR here and set data.root=DIR"

    @property
    def how_to_get(self) -> str:
        """The next step of somebody who has no copy."""
        return f"set data.root=DIR and data.args.download=true, or {self.elsewhere}"

    def inspect(self, root: Path | None, args: DownloadArgs, split: Split) -> DataInfo:
        sizes, shape = self.sizes_and_shape(self._complete_folder(root, args))
        return DataInfo(
            name=self.name,
            inputs=TensorInfo(shape, torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=self.num_classes,
            sizes=sizes,
        )

    def open(self, root: Path | None, args: DownloadArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        try:
            with _connect_timeout(_CONNECT_TIMEOUT):
                dataset = self.cls(root, train=split == "train", download=args.download)
        except (
            OSError,
            RuntimeError,
        ) as error:  # no network or full disk; torchvision's own for wrong checksums
            where = "data.args.download" if args.download else "data.root"
            raise SpecError([Problem(where, self.failure(root, args, error), self.elsewhere)]) from error
        return Transformed(TensorSamples(*self.rows(dataset)), [unit_float])

    def failure(self, root: Path | None, args: DownloadArgs, error: Exception) -> str:
        """What went wrong when torchvision opened the data set."""
        did = "downloading" if args.download else "opening"
        return f"{did} '{self.name}' in {root} failed: {' '.join(str(error).split())}"

    def _complete_folder(self, root: Path | None, args: DownloadArgs) -> Path | None:
        """The folder with all of the files, or None where they will be downloaded. Raises SpecError otherwise."""
        folder = None if root is None else root / self.folder
        missing = [file for file in self.files if folder is None or not (folder / file).is_file()]
        if folder is not None and missing and args.download:
            return None
        require_root(self.name, root, self.how_to_get)
        if missing:
            what = f"the data set '{self.name}' lacks {', '.join(missing)} in {folder}"
            raise SpecError([Problem("data.root", what, self.how_to_get)])
        return folder


class _Mnist(_TorchvisionSet):
    """The IDX files of the MNIST family."""

    @property
    def folder(self) -> str:
        return f"{self.cls.__name__}/raw"

    @property
    def files(self) -> Sequence[str]:
        return [Path(archive).stem for archive, _ in self.cls.resources]

    def sizes_and_shape(self, folder: Path | None) -> tuple[dict[Split, int], tuple[int, ...]]:
        if folder is None:
            return {"train": 60_000, "val": 10_000}, (1, 28, 28)
        sizes: dict[Split, int] = {}
        shapes = set()
        for split, prefix in zip(SPLITS, ("train", "t10k"), strict=True):
            count, *shape = self._idx_sizes(folder / f"{prefix}-images-idx3-ubyte", 3)
            (labels,) = self._idx_sizes(folder / f"{prefix}-labels-idx1-ubyte", 1)
            if count != labels:
                raise self._damaged(folder, f"{count} images and {labels} labels for the split '{split}'")
            sizes[split] = count
            shapes.add((1, *shape))
        if len(shapes) > 1:
            raise self._damaged(folder, f"images of {' and '.join(str(list(s)) for s in sorted(shapes))}")
        return sizes, shapes.pop()

    def rows(self, dataset: Any) -> tuple[Tensor, Tensor]:
        return dataset.data.unsqueeze(1), dataset.targets

    def _idx_sizes(self, path: Path, ndim: int) -> tuple[int, ...]:
        """The sizes in an IDX header: two zeros, 8 for uint8, the number of dimensions, four bytes for each."""
        with path.open("rb") as file:
            header = file.read(4 + 4 * ndim)
        if len(header) < 4 + 4 * ndim or header[:4] != bytes([0, 0, 8, ndim]):
            raise self._damaged(path, "not an IDX file of this kind")
        sizes = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
        found, promised = path.stat().st_size, len(header) + math.prod(sizes)
        if found != promised:
            raise self._damaged(path, f"{found} bytes, where its header promises {promised}")
        return sizes

    def _damaged(self, path: Path, found: str) -> SpecError:
        return SpecError([Problem("data.root", f"{path}: {found}", f"replace the data: {self.elsewhere}")])


class _Cifar(_TorchvisionSet):
    """The pickled batches of the CIFAR family.

    torchvision opens them only after their MD5 sums have matched its own: no other pickle is ever loaded.
    """

    @property
    def folder(self) -> str:
        return str(self.cls.base_folder)

    @property
    def files(self) -> Sequence[str]:
        return [file for file, _ in self._sums()]

    def sizes_and_shape(self, folder: Path | None) -> tuple[dict[Split, int], tuple[int, ...]]:
        return {"train": 50_000, "val": 10_000}, (3, 32, 32)

    def rows(self, dataset: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(dataset.data).permute(0, 3, 1, 2), torch.tensor(dataset.targets)

    def failure(self, root: Path | None, args: DownloadArgs, error: Exception) -> str:
        folder = (root or Path()) / self.folder
        wrong = [file for file, md5 in self._sums() if not check_integrity(folder / file, md5)]
        if args.download or not wrong:
            return super().failure(root, args, error)
        return f"in {folder} not the published files of '{self.name}' (by MD5): {', '.join(wrong)}"

    def _sums(self) -> list[tuple[str, str]]:
        meta = (self.cls.meta["filename"], self.cls.meta["md5"])
        return [*map(tuple, self.cls.train_list + self.cls.test_list), meta]


@contextmanager
def _connect_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


MNIST = _Mnist("mnist", datasets.MNIST, 10)
FASHION_MNIST = _Mnist("fashion_mnist", datasets.FashionMNIST, 10)
CIFAR10 = _Cifar("cifar10", datasets.CIFAR10, 10)
CIFAR100 = _Cifar("cifar100", datasets.CIFAR100, 100)

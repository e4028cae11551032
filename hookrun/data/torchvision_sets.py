"""MNIST, FashionMNIST, CIFAR10 and CIFAR100: read from where torchvision stores them, or downloaded on request."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets import mnist
from torchvision.datasets.utils import check_integrity

from hookrun.config.validation import Args
from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Samples, TensorSamples, Transformed, unit_float
from hookrun.data.source import Source, require_root
from hookrun.errors import Problem, SpecError, reason

_CONNECT_TIMEOUT = 30.0  # seconds; without it a network that drops packets blocks a download for minutes


class DownloadArgs(Args):
    """download: let torchvision download missing files into data.root."""

    download: bool = False


@dataclass(frozen=True)
class _TorchvisionSet(Source[DownloadArgs]):
    """A data set that torchvision loads into memory; images become float [C, H, W] in 0..1."""

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
        """Samples in each split and the shape of one image; of the published data where `folder` is None."""

    @abstractmethod
    def read(self, root: Path | None, args: DownloadArgs, split: Split) -> tuple[Tensor, Tensor]:
        """The uint8 images [N, C, H, W] and the int64 labels [N] of a split. Raises SpecError as `inspect` does."""

    @abstractmethod
    def class_names(self, root: Path | None) -> Sequence[str]:
        """The name of each label."""

    @property
    def elsewhere(self) -> str:
        """How to get the data on another machine that has a network."""
        name = self.cls.__name__
        command = f"python -c \"from torchvision.datasets import {name}; {name}('DIR', download=True)\""
        return f"on a machine with a network run {command}, bring DIR here and set data.root=DIR"

    @property
    def how_to_get(self) -> str:
        """The hint for a user without a copy of the data."""
        return f"set data.root=DIR and data.args.download=true, or {self.elsewhere}"

    def inspect(self, root: Path | None, args: DownloadArgs, split: Split) -> DataInfo:
        sizes, shape = self.sizes_and_shape(self.complete_folder(root, args))
        return DataInfo(
            name=self.name,
            inputs=TensorInfo(shape, torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=self.num_classes,
            sizes=sizes,
        )

    def open(self, root: Path | None, args: DownloadArgs, split: Split, seed: int) -> Samples:
        images, labels = self.read(root, args, split)
        return Transformed(TensorSamples(images, labels, self.class_names(root)), [unit_float])

    def opened(self, root: Path | None, args: DownloadArgs, split: Split) -> Any:
        """torchvision's own data set, downloaded if files are missing and `args.download` is true."""
        try:
            with _connect_timeout(_CONNECT_TIMEOUT):
                return self.cls(root, train=split == "train", download=args.download)
        except Exception as error:  # no network, a full disk, wrong sums, or anything for a damaged file
            where = "data.args.download" if args.download else "data.root"
            raise SpecError([Problem(where, self.failure(root, args, error), self.elsewhere)]) from error

    def failure(self, root: Path | None, args: DownloadArgs, error: Exception) -> str:
        """What went wrong when torchvision opened the data set."""
        said = " ".join(str(error).split()) or type(error).__name__
        did = "downloading" if args.download else "opening"
        return f"{did} '{self.name}' in {root} failed: {said}"

    def complete_folder(self, root: Path | None, args: DownloadArgs) -> Path | None:
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
    """The IDX files of the MNIST family. torchvision checks no sums of files that it did not download itself."""

    @property
    def folder(self) -> str:
        return f"{self.cls.__name__}/raw"

    @property
    def files(self) -> Sequence[str]:
        return [Path(archive).stem for archive, _ in self.cls.resources]

    def sizes_and_shape(self, folder: Path | None) -> tuple[dict[Split, int], tuple[int, ...]]:
        if folder is None:
            return {"train": 60_000, "val": 10_000}, (1, 28, 28)
        tensors = {split: self._tensors(folder, split) for split in SPLITS}
        train, val = (list(images.shape[1:]) for images, _ in tensors.values())
        if train != val:
            raise self._damaged(folder, f"images of {train} for training and of {val} for validation")
        return {split: len(images) for split, (images, _) in tensors.items()}, tuple(train)

    def read(self, root: Path | None, args: DownloadArgs, split: Split) -> tuple[Tensor, Tensor]:
        folder = self.complete_folder(root, args)
        if folder is None:
            self.opened(root, args, split)
            folder = require_root(self.name, root, self.how_to_get) / self.folder
        return self._tensors(folder, split)

    def class_names(self, root: Path | None) -> Sequence[str]:
        return tuple(self.cls.classes)

    def _tensors(self, folder: Path, split: Split) -> tuple[Tensor, Tensor]:
        """Images and labels. Raises SpecError for damaged files, and where there are not as many of both."""
        prefix = "train" if split == "train" else "t10k"
        images = self._read(mnist.read_image_file, folder / f"{prefix}-images-idx3-ubyte")
        labels = self._read(mnist.read_label_file, folder / f"{prefix}-labels-idx1-ubyte")
        if len(images) != len(labels):
            what = f"{len(images)} images and {len(labels)} labels for the split '{split}'"
            raise self._damaged(folder, what)
        return images.unsqueeze(1), labels

    def _read(self, read: Callable[[str], Tensor], path: Path) -> Tensor:
        try:
            return read(str(path))
        except OSError:
            raise
        except Exception as error:  # torchvision's reader may raise anything for a damaged file
            raise self._damaged(path, f"torchvision cannot read it as IDX ({reason(error)})") from error

    def _damaged(self, path: Path, found: str) -> SpecError:
        return SpecError([Problem("data.root", f"{path}: {found}", f"replace the data: {self.elsewhere}")])


class _Cifar(_TorchvisionSet):
    """The pickled batches of the CIFAR family.

    torchvision loads a pickle only after its MD5 sum has matched the published one, so no other pickle is ever loaded.
    """

    @property
    def folder(self) -> str:
        return str(self.cls.base_folder)

    @property
    def files(self) -> Sequence[str]:
        return [file for file, _ in self._sums()]

    def sizes_and_shape(self, folder: Path | None) -> tuple[dict[Split, int], tuple[int, ...]]:
        return {"train": 50_000, "val": 10_000}, (3, 32, 32)

    def read(self, root: Path | None, args: DownloadArgs, split: Split) -> tuple[Tensor, Tensor]:
        self.complete_folder(root, args)
        dataset = self.opened(root, args, split)
        return torch.from_numpy(dataset.data).permute(0, 3, 1, 2), torch.tensor(dataset.targets)

    def class_names(self, root: Path | None) -> Sequence[str]:
        # A pickle as well, which torchvision loads after its sum has matched.
        return tuple(self.opened(root, DownloadArgs(), "val").classes)

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

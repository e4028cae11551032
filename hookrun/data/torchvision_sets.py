"""MNIST, FashionMNIST, CIFAR10 and CIFAR100: read from where torchvision stores them, or downloaded on request."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets import mnist
from torchvision.datasets.utils import check_integrity

from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Samples, TensorSamples, transformed, unit_float
from hookrun.data.source import Source, require_root
from hookrun.engine.spec.when import typed
from hookrun.errors import Problem, SpecError, reason, spec_error

_CONNECT_TIMEOUT = 30.0  # seconds; without it a network that drops packets blocks a download for minutes


class _TorchvisionSet(Source):
    """A data set that torchvision loads into memory; images become float [C, H, W] in 0..1.

    download: let torchvision download missing files into data.root

    published:    torchvision's class
    as_published: samples in each split, and the shape of one image
    """

    download: bool = False
    published: ClassVar[Any]
    as_published: ClassVar[tuple[dict[Split, int | None], tuple[int, ...]]]
    num_classes: ClassVar[int] = 10

    @abstractmethod
    def files(self) -> tuple[str, Sequence[str]]:
        """The folder below the root that holds the files, and their names."""

    def sizes_and_shape(self, folder: Path) -> tuple[dict[Split, int | None], tuple[int, ...]]:
        """Samples in each split and the shape of one image. Raises SpecError for damaged files."""
        return self.as_published

    @abstractmethod
    def read(self, root: Path | None, split: Split) -> tuple[Tensor, Tensor, Sequence[str]]:
        """The uint8 images [N, C, H, W] and the int64 labels [N] of a split, and the name of each label."""

    @property
    def elsewhere(self) -> str:
        """How to get the data on another machine that has a network."""
        name = self.published.__name__
        command = f"python -c \"from torchvision.datasets import {name}; {name}('DIR', download=True)\""
        return f"on a machine with a network run {command}, bring DIR here and set data.root=DIR"

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        folder, is_complete = self.folder(root)
        sizes, shape = self.sizes_and_shape(folder) if is_complete else self.as_published
        # those of CIFAR are in its files
        classes: Sequence[str] | None = getattr(self.published, "classes", None)
        return DataInfo(
            name=self.name,
            inputs=TensorInfo(shape, torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=self.num_classes,
            sizes=sizes,
            fields={"class": None if classes is None else [*map(typed, classes)]},
        )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        images, labels, classes = self.read(root, split)
        return transformed(TensorSamples(images, labels, classes), [unit_float])

    def folder(self, root: Path | None) -> tuple[Path, bool]:
        """The folder of the files, and whether they are all there. Raises SpecError if not and without `download`."""
        hint = f"set data.root=DIR and data.args.download=true, or {self.elsewhere}"
        if root is None or not self.download:
            root = require_root(self.name, root, hint)
        below, names = self.files()
        folder = root / below
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and not self.download:
            raise spec_error(
                "data.root", f"the data set '{self.name}' lacks {', '.join(missing)} in {folder}", hint
            )
        return folder, not missing

    def opened(self, root: Path | None, split: Split) -> Any:
        """torchvision's own data set, downloaded if files are missing and `download` is true."""
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_CONNECT_TIMEOUT)
        try:
            return self.published(root, train=split == "train", download=self.download)
        except Exception as error:  # no network, a full disk, wrong sums, or anything for a damaged file
            where = "data.args.download" if self.download else "data.root"
            raise spec_error(where, self.failure(root, error), self.elsewhere) from error
        finally:
            socket.setdefaulttimeout(before)

    def failure(self, root: Path | None, error: Exception) -> str:
        """What went wrong when torchvision opened the data set."""
        said = " ".join(str(error).split()) or type(error).__name__
        did = "downloading" if self.download else "opening"
        return f"{did} '{self.name}' in {root} failed: {said}"


class _IdxFiles(_TorchvisionSet):
    """The IDX files of the MNIST family. torchvision checks no sums of files that it did not download itself."""

    as_published = {"train": 60_000, "val": 10_000}, (1, 28, 28)

    def files(self) -> tuple[str, Sequence[str]]:
        return f"{self.published.__name__}/raw", [
            Path(archive).stem for archive, _ in self.published.resources
        ]

    def sizes_and_shape(self, folder: Path) -> tuple[dict[Split, int | None], tuple[int, ...]]:
        images = {split: self._images_and_labels(folder, split)[0] for split in SPLITS}
        train, val = (list(images[split].shape[1:]) for split in SPLITS)
        if train != val:
            raise self._damaged(folder, f"images of {train} for training and of {val} for validation")
        return {split: len(images[split]) for split in SPLITS}, tuple(train)

    def read(self, root: Path | None, split: Split) -> tuple[Tensor, Tensor, Sequence[str]]:
        folder, is_complete = self.folder(root)
        if not is_complete:
            self.opened(root, split)
        return *self._images_and_labels(folder, split), tuple(self.published.classes)

    def _images_and_labels(self, folder: Path, split: Split) -> tuple[Tensor, Tensor]:
        """Raises SpecError for damaged files, and where there are not as many of both."""
        prefix = "train" if split == "train" else "t10k"
        tensors = []
        for read, file in (
            (mnist.read_image_file, "images-idx3-ubyte"),
            (mnist.read_label_file, "labels-idx1-ubyte"),
        ):
            path = folder / f"{prefix}-{file}"
            try:
                tensors.append(read(str(path)))
            except OSError:
                raise
            except Exception as error:  # torchvision's reader may raise anything for a damaged file
                raise self._damaged(path, f"torchvision cannot read it as IDX ({reason(error)})") from error
        images, labels = tensors
        if len(images) != len(labels):
            raise self._damaged(
                folder, f"{len(images)} images and {len(labels)} labels for the split '{split}'"
            )
        return images.unsqueeze(1), labels

    def _damaged(self, path: Path, what: str) -> SpecError:
        return SpecError([Problem("data.root", f"{path}: {what}", f"replace the data: {self.elsewhere}")])


class _PickledBatches(_TorchvisionSet):
    """The pickled batches of the CIFAR family.

    torchvision loads a pickle only after its MD5 sum has matched the published one, so no other pickle is ever loaded.
    """

    as_published = {"train": 50_000, "val": 10_000}, (3, 32, 32)

    def files(self) -> tuple[str, Sequence[str]]:
        return str(self.published.base_folder), list(self._sums())

    def read(self, root: Path | None, split: Split) -> tuple[Tensor, Tensor, Sequence[str]]:
        self.folder(root)
        batches = self.opened(root, split)
        images = torch.from_numpy(batches.data).permute(0, 3, 1, 2)
        return images, torch.tensor(batches.targets), tuple(batches.classes)

    def failure(self, root: Path | None, error: Exception) -> str:
        folder = (root or Path()) / self.published.base_folder
        wrong = [name for name, md5 in self._sums().items() if not check_integrity(folder / name, md5)]
        if self.download or not wrong:
            return super().failure(root, error)
        return f"in {folder} not the published files of '{self.name}' (by MD5): {', '.join(wrong)}"

    def _sums(self) -> dict[str, str]:
        """The MD5 sum of each file."""
        meta = self.published.meta
        batches = self.published.train_list + self.published.test_list
        return {**dict(batches), meta["filename"]: meta["md5"]}


class MNIST(_IdxFiles):
    """Handwritten digits."""

    name = "mnist"
    published = datasets.MNIST


class FashionMNIST(_IdxFiles):
    """Pictures of clothes."""

    name = "fashion_mnist"
    published = datasets.FashionMNIST


class CIFAR10(_PickledBatches):
    """Colour photographs of ten kinds of things."""

    name = "cifar10"
    published = datasets.CIFAR10


class CIFAR100(_PickledBatches):
    """Colour photographs of a hundred kinds of things."""

    name = "cifar100"
    published = datasets.CIFAR100
    num_classes = 100

"""Images in one folder for each class, as in torchvision's ImageFolder; ImageNet is one of these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from pydantic import Field
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file
from torchvision.transforms.v2.functional import pil_to_tensor

from hookrun.config.validation import Args
from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples, unit_float
from hookrun.data.source import A, Source, require_root, stratified_indices
from hookrun.errors import HookrunError, Problem, SpecError, listed, printable

_SHOWN = 6  # folders in an error, before "and 3 more"


class ImageFolderArgs(Args):
    """val_fraction: the fraction of each class that is for validation if there are no train and val folders."""

    val_fraction: float = Field(default=0.2, ge=0, le=1)


class ImageNetArgs(Args):
    """classes: the number of class folders that there must be; null: any number."""

    classes: int | None = Field(default=1000, ge=1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The folder of class folders of each split, the sorted class names, and whether both splits share the folder."""

    folders: dict[Split, Path]
    classes: tuple[str, ...]
    shared: bool = False


class _Folders(Source[A]):
    """Float [3, H, W] images in 0..1; a label is the index of a folder's name among the sorted names."""

    hint = "put the images at DIR/train/CLASS/... and DIR/val/CLASS/... and set data.root=DIR"

    def layout(self, root: Path | None, split: Split) -> Layout:
        """The folders below the root. Raises SpecError where the split's is missing or the classes differ."""
        root = require_root(self.name, root, self.hint)
        folders: dict[Split, Path] = {s: root / s for s in SPLITS if (root / s).is_dir()}
        if not folders:
            return self.flat_layout(root, split)
        if split not in folders:
            raise self.missing(root / split)
        classes = {s: self.class_folders(folder) for s, folder in folders.items()}
        if len(set(classes.values())) > 1:
            odd = listed(sorted(set(classes["train"]) ^ set(classes["val"])), _SHOWN)
            what = f"train and val in {root} differ in their class folders, hence in their labels: {odd}"
            raise SpecError([Problem("data.root", what, "give both the same class folders")])
        return Layout(folders, classes[split])

    def flat_layout(self, root: Path, split: Split) -> Layout:
        """The layout of a root that has neither a train nor a val folder."""
        raise self.missing(root / split)

    def class_folders(self, folder: Path) -> tuple[str, ...]:
        """The sorted names of the class folders. Raises SpecError where there are none."""
        classes = tuple(_folders_in(folder))
        if not classes:
            what = f"the data set '{self.name}' finds no class folders in {folder}"
            raise SpecError([Problem("data.root", what, self.hint)])
        return classes

    def missing(self, folder: Path) -> SpecError:
        """The error for a missing folder of a split; it lists the folders that exist."""
        found = listed(_folders_in(folder.parent), _SHOWN) or "no folder"
        what = f"the data set '{self.name}' has no folder {folder}; beside it there is {found}"
        return SpecError([Problem("data.root", what, self.hint)])

    def description(self, layout: Layout, empty: Split | None = None) -> DataInfo:
        """Images of any size; transforms give them one size. `empty` is a split without images."""
        return DataInfo(
            name=self.name,
            inputs=TensorInfo((3, -1, -1), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=len(layout.classes),
            sizes={split: None if split in layout.folders and split != empty else 0 for split in SPLITS},
        )

    def require_images(self, folder: Path, classes: Sequence[str]) -> None:
        """Raise SpecError if a class has no image, in its folder or below it."""
        if empty := [name for name in classes if not _has_image(folder / name)]:
            what = f"{folder}: there are no images in {listed(empty, _SHOWN)}"
            hint = f"give each class an image ({' '.join(IMG_EXTENSIONS)}), or remove its folder"
            raise SpecError([Problem("data.root", what, hint)])

    def images(self, folder: Path) -> list[tuple[str, int]]:
        """Path and label of every image, by class and name."""
        return list(ImageFolder(folder).samples)


class _ImageFolder(_Folders[ImageFolderArgs]):
    """root/train/CLASS and root/val/CLASS; or root/CLASS, of which a fixed fraction is for validation."""

    args = ImageFolderArgs

    def flat_layout(self, root: Path, split: Split) -> Layout:
        classes = self.class_folders(root)
        # Folders that hold no images themselves may be splits under other names; they must not be taken for classes.
        if not any(_holds_image(root / name) for name in classes):
            raise self.missing(root / split)
        return Layout(dict.fromkeys(SPLITS, root), classes, shared=True)

    def inspect(self, root: Path | None, args: ImageFolderArgs, split: Split) -> DataInfo:
        layout = self.layout(root, split)
        empty: Split | None = None
        if layout.shared and args.val_fraction in (0, 1):
            empty = "val" if args.val_fraction == 0 else "train"
        if split == empty:
            what = (
                f"none of the images in {root} is for the split '{split}' (val_fraction {args.val_fraction})"
            )
            raise SpecError([Problem("data.args.val_fraction", what, "set it between 0 and 1")])
        self.require_images(layout.folders[split], layout.classes)
        return self.description(layout, empty)

    def open(self, root: Path | None, args: ImageFolderArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        layout = self.layout(root, split)
        images = self.images(layout.folders[split])
        if layout.shared:
            train, val = stratified_indices([label for _, label in images], args.val_fraction)
            images = [images[i] for i in (train if split == "train" else val)]
        return _Images(images, layout.folders[split], root, layout.classes)


class _ImageNet(_Folders[ImageNetArgs]):
    """root/train/WNID and root/val/WNID, with the labels in the order of torchvision's published weights."""

    args = ImageNetArgs
    hint = (
        "where the archives of image-net.org are, unpack them with torchvision.datasets.ImageNet('DIR', 'train') "
        "and torchvision.datasets.ImageNet('DIR', 'val'), and set data.root=DIR"
    )

    def inspect(self, root: Path | None, args: ImageNetArgs, split: Split) -> DataInfo:
        layout = self.layout(root, split)
        found = len(layout.classes)
        if args.classes not in (None, found):
            what = f"{layout.folders[split]} has {found} class folders, where {args.classes} are expected"
            hint = "complete them, or for a subset with labels of its own set data.args.classes=null"
            raise SpecError([Problem("data.args.classes", what, hint)])
        self.require_images(layout.folders[split], layout.classes)
        return self.description(layout)

    def open(self, root: Path | None, args: ImageNetArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        layout = self.layout(root, split)
        return _Images(self.images(layout.folders[split]), layout.folders[split], root, layout.classes)


class _Images(Samples):
    """Image files with their labels, decoded when they are read."""

    def __init__(
        self, images: list[tuple[str, int]], folder: Path, root: Path | None, classes: Sequence[str]
    ) -> None:
        self._images = images
        self._root = root or folder
        self.classes = classes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        path, label = self._images[index]
        try:
            with Image.open(path) as image:
                pixels = pil_to_tensor(image.convert("RGB"))
        except OSError as error:  # an unknown format or a truncated file; PIL's message does not name it
            raise HookrunError(
                f"{printable(path)} cannot be read as an image: {printable(str(error))}"
            ) from error
        return unit_float(pixels), torch.tensor(label)

    def file(self, index: int) -> str:
        """The path below the data's root."""
        return os.path.relpath(self._images[index][0], self._root)


def _folders_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _has_image(folder: Path) -> bool:
    """Whether ImageFolder would find an image in the folder or below it."""
    with os.scandir(folder) as entries:
        if any(
            is_image_file(entry.name) and entry.is_file() for entry in entries
        ):  # without reading the whole folder
            return True
    walk = os.walk(folder, followlinks=True)
    return any(is_image_file(name) for _, _, names in walk for name in names)


def _holds_image(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_image_file(entry.name) and entry.is_file() for entry in entries)


IMAGE_FOLDER = _ImageFolder("image_folder")
IMAGENET = _ImageNet("imagenet")

"""Images in one folder for each class, as in torchvision's ImageFolder; ImageNet is one of these."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar
from warnings import catch_warnings

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from pydantic import Field
from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file
from torchvision.transforms.v2.functional import pil_to_tensor

from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples, unit_float
from hookrun.data.source import Source, require_root, stratified_part
from hookrun.engine.spec.when import typed
from hookrun.errors import HookrunError, listed, printable, spec_error

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What an image file may hold, whatever its name says. For EPS Pillow would start Ghostscript, which runs programs."""

_MOST_OPENED = 200
"""How many images, evenly spread over a split, are opened for lines of the plan."""


class _ClassFolders(Source):
    """Float [3, H, W] images in 0..1; a label is the index of a folder's name among the sorted names.

    16-bit grey images are divided by 65535. Of images with several frames the first is read.

    max_pixels: width times height of the largest image that is decoded; larger ones are an error
    exif:       turn images upright as their EXIF orientation says; torchvision's ImageFolder does not

    hint: how to get the data
    """

    max_pixels: int = Field(default=64_000_000, ge=1)
    exif: bool = True
    hint: ClassVar[str] = "put the images at DIR/train/CLASS/... and DIR/val/CLASS/... and set data.root=DIR"

    def layout(self, root: Path | None, split: Split) -> tuple[Path, tuple[str, ...], Sequence[Split]]:
        """The folder of the split's images, the sorted names of the classes, and the splits that there are.

        Raises SpecError if the split has no folder, or the splits differ in their classes.
        """
        root = require_root(self.name, root, self.hint)
        folders = {part: root / part for part in SPLITS if (root / part).is_dir()}
        if split not in folders:
            beside = listed(_folders_in(root)) or "no folder"
            raise spec_error(
                "data.root",
                f"the data set '{self.name}' has no folder {root / split}; beside it there is {beside}",
                self.hint,
            )
        classes = {part: self.classes_in(folder) for part, folder in folders.items()}
        if len(set(classes.values())) > 1:
            odd = listed(sorted(set(classes["train"]) ^ set(classes["val"])))
            raise spec_error(
                "data.root",
                f"train and val in {root} differ in their class folders, hence in their labels: {odd}",
                "give both the same class folders",
            )
        return folders[split], classes[split], list(folders)

    def classes_in(self, folder: Path) -> tuple[str, ...]:
        """The sorted names of the class folders. Raises SpecError where there are none."""
        classes = tuple(_folders_in(folder))
        if not classes:
            raise spec_error(
                "data.root", f"the data set '{self.name}' finds no class folders in {folder}", self.hint
            )
        return classes

    def images(
        self, root: Path | None, split: Split
    ) -> tuple[Sequence[tuple[str, int | None]], tuple[str, ...]]:
        """Path and label of every image, in the order of torchvision's ImageFolder, and the name of each label."""
        folder, classes, _ = self.layout(root, split)
        images: list[tuple[str, int | None]] = []
        for label, name in enumerate(classes):
            images += [(path, label) for path in _images_below(folder / name)]
        return images, classes

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        """Images of any size; transforms give them one size. Raises SpecError if a class has no image."""
        folder, classes, splits = self.layout(root, split)
        empty: list[str] = []
        for name in classes:
            if not _holds_image(folder / name) and next(_images_below(folder / name), None) is None:
                empty.append(name)
        if empty:
            hint = f"give each class an image ({' '.join(IMG_EXTENSIONS)}), or remove its folder"
            raise spec_error("data.root", f"{folder}: there are no images in {listed(empty)}", hint)
        return DataInfo(
            name=self.name,
            inputs=TensorInfo((3, -1, -1), torch.float32),
            target=TensorInfo((), torch.int64),
            num_classes=len(classes),
            sizes={split: None if split in splits else 0 for split in SPLITS},
            fields={"class": [*map(typed, classes)]},
            remarks=partial(self._remarks, root, split),
        )

    def _remarks(self, root: Path | None, split: Split) -> Iterator[str]:
        """Lines on images of the split that are turned, of which one frame is read, or that are left out.

        Raises SpecError for an image whose numbers have no known scale.
        """
        images, _ = self.images(root, split)
        chosen = [path for path, _ in images[:: -(-len(images) // _MOST_OPENED)]]
        turned = animated = 0
        wrong: str | None = None
        for path in chosen:
            # what cannot be opened is an error when it is read
            with (
                suppress(Exception),
                catch_warnings(action="ignore"),
                Image.open(path, formats=_FORMATS) as image,
            ):
                is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
                turned += is_turned and (self.exif or image.format != "TIFF")  # these Pillow itself turns
                animated += getattr(image, "is_animated", False)
                wrong = _wrong_mode(image)
            if wrong is not None:
                what = f"{path} cannot be read as an image: {wrong}"
                raise spec_error("data.root", what, "or leave it out")
        among = f"of {len(chosen)} images opened ({len(images):,} in all)"
        if turned:
            applied = "applied; data.args.exif=false" if self.exif else "not applied; data.args.exif=true"
            yield f"EXIF orientation in {turned} {among}: {applied} changes that"
        if animated:
            yield f"several frames in {animated} {among}: the first is read"
        left_out = Counter[str]()
        for folder in {*map(os.path.dirname, chosen)}:
            left_out.update(
                Path(name).suffix.lower() for name in os.listdir(folder) if not is_image_file(name)
            )
        for suffix, count in sorted(left_out.items()):
            if Image.registered_extensions().get(suffix) in _FORMATS:
                yield f"{count:,} {suffix} images are left out, as torchvision's ImageFolder does"

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        self.inspect(root, split)
        images, classes = self.images(root, split)
        return Samples(
            len(images),
            partial(_read, images, self.max_pixels, self.exif),
            partial(_place, images, root),
            classes,
        )


class ImageFolder(_ClassFolders):
    """root/train/CLASS and root/val/CLASS; or root/CLASS, of which a fixed fraction is for validation; or root alone.

    Images directly in root, without folders beside them, have no labels, and all of them are val.

    val_fraction: the fraction of each class that is for validation if there are no train and val folders
    """

    name = "image_folder"
    hint = (
        "it reads DIR/CLASS/..., or DIR/train/CLASS/... and DIR/val/CLASS/..., or for task=predict images directly in "
        "DIR; set data.root=DIR"
    )
    val_fraction: float = Field(default=0.2, ge=0, le=1)

    def layout(self, root: Path | None, split: Split) -> tuple[Path, tuple[str, ...], Sequence[Split]]:
        root = require_root(self.name, root, self.hint)
        classes = self.classes_in(root)
        # Folders that hold no images themselves may be splits under other names; they must not be taken for classes.
        if set(SPLITS) & set(classes) or not any(_holds_image(root / name) for name in classes):
            return super().layout(root, split)
        empty = {0.0: "val", 1.0: "train"}.get(self.val_fraction)
        splits = [part for part in SPLITS if part != empty]
        if split not in splits:
            raise spec_error(
                "data.args.val_fraction",
                f"none of the images in {root} is for the split '{split}' (val_fraction {self.val_fraction})",
                "set it between 0 and 1",
            )
        return root, classes, splits

    def images(
        self, root: Path | None, split: Split
    ) -> tuple[Sequence[tuple[str, int | None]], tuple[str, ...]]:
        if root is not None and (alone := _images_alone(root)):
            return [(path, None) for path in alone], ()
        images, classes = super().images(root, split)
        if self.layout(root, split)[0] == root:
            rows = stratified_part([label for _, label in images], self.val_fraction, split)
            images = [images[number] for number in rows]
        return images, classes

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        if root is None or not (count := len(_images_alone(root))):
            return super().inspect(root, split)
        if split == "train":
            raise spec_error(
                "data.root",
                f"the images in {root} are in no class folders, so they have no labels to train with",
                self.hint,
            )
        images = TensorInfo((3, -1, -1), torch.float32)
        sizes: dict[Split, int | None] = {"train": 0, "val": count}
        return DataInfo(self.name, images, None, None, sizes, remarks=partial(self._remarks, root, split))


class ImageNet(_ClassFolders):
    """root/train/WNID and root/val/WNID, with the labels in the order of torchvision's published weights.

    classes: the number of class folders that there must be; null: any number
    """

    name = "imagenet"
    exif: bool = False  # as the published weights were measured
    classes: int | None = Field(default=1000, ge=1)
    hint = (
        "where the archives of image-net.org are, unpack them with torchvision.datasets.ImageNet('DIR', 'train') "
        "and torchvision.datasets.ImageNet('DIR', 'val'), and set data.root=DIR"
    )

    def layout(self, root: Path | None, split: Split) -> tuple[Path, tuple[str, ...], Sequence[Split]]:
        folder, classes, splits = super().layout(root, split)
        if self.classes not in (None, len(classes)):
            raise spec_error(
                "data.args.classes",
                f"{folder} has {len(classes)} class folders, where {self.classes} are expected",
                "complete them, or for a subset with labels of its own set data.args.classes=null",
            )
        return folder, classes, splits


def _read(images: Sequence[tuple[str, int | None]], max_pixels: int, exif: bool, number: int) -> Sample:
    """The decoded image with its label, if it has one. HookrunError for a file that is too large or damaged."""
    path, label = images[number]
    try:
        pixels = _decoded(path, max_pixels, exif)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise HookrunError(
            f"{printable(path)} is larger than data.args.max_pixels, {max_pixels:,}: {error}\n"
            "    make it smaller, or raise data.args.max_pixels"
        ) from error
    except Exception as error:  # of a damaged file; Pillow's message does not name it
        what = f"{printable(path)} cannot be read as an image: {printable(str(error))}"
        raise HookrunError(what) from error
    return pixels, torch.empty(0) if label is None else torch.tensor(label)


def _decoded(path: str, max_pixels: int, exif: bool) -> torch.Tensor:
    """The pixels [3, H, W] float32 in 0..1. Raises what Pillow does, and DecompressionBombError beyond max_pixels."""
    if not os.path.isfile(path):
        raise OSError("it is not a file")  # opening a pipe would wait for its writer
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow's own limit, which is for the whole process
    with Image.open(path, formats=_FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise Image.DecompressionBombError(f"it has {image.width:,} x {image.height:,} pixels")
        if (wrong := _wrong_mode(image)) is not None:
            raise ValueError(wrong)
        if exif:
            try:
                ImageOps.exif_transpose(image, in_place=True)
            except Exception as error:  # Pillow raises several types
                raise ValueError(
                    f"its EXIF block is damaged ({error}): data.args.exif=false ignores it"
                ) from error
        if _has_16_bits(image):
            grey = torch.from_numpy(np.asarray(image).astype(np.float32)).div_(65535)
            return grey.repeat(3, 1, 1)
        return unit_float(pil_to_tensor(image.convert("RGB")))


def _has_16_bits(image: Image.Image) -> bool:
    # Pillow has no mode of 16 bits for PPM, whose numbers it brings to 0..65535
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def _wrong_mode(image: Image.Image) -> str | None:
    """Why the numbers of an image have no known scale; None: they have one."""
    if image.mode not in ("I", "F") or _has_16_bits(image):
        return None
    return f"its mode {image.mode} has 32 bits, and which number is white is not known: save it with 8 or 16 bits"


def _place(images: Sequence[tuple[str, int | None]], root: Path | None, number: int) -> str:
    """The path of an image below the data's root."""
    return os.path.relpath(images[number][0], root)


def _images_alone(root: Path) -> list[str]:
    """The images directly in a folder, sorted by name; none if it has folders too, or does not exist."""
    if not root.is_dir() or _folders_in(root):
        return []
    with os.scandir(root) as entries:
        return sorted(entry.path for entry in entries if is_image_file(entry.name) and entry.is_file())


def _folders_in(folder: Path | str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(
            each.name
            for each in entries
            if (os.path.isdir(each.path) if each.is_symlink() else each.is_dir())
        )


def _images_below(folder: Path) -> Iterator[str]:
    """The image files of a class folder and those below it, by folder and name.

    A folder to which links lead again counts once, and the folder of all classes never.
    """
    seen = {os.path.realpath(folder.parent)}
    images: dict[str, list[str]] = {}
    pending = [str(folder)]
    while pending:
        path = pending.pop()
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        below = _folders_in(path)
        names = [name for name in sorted(os.listdir(path)) if is_image_file(name) and name not in below]
        images[path] = [os.path.join(path, name) for name in names]
        pending += [os.path.join(path, name) for name in reversed(below)]
    for path in sorted(images):
        yield from images[path]


def _holds_image(folder: Path) -> bool:
    """Whether an image is in the folder itself: known without reading all of it."""
    with os.scandir(folder) as entries:
        return any(is_image_file(entry.name) and os.path.isfile(entry.path) for entry in entries)

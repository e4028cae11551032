"""Images in class folders: labels in the order of names, the same in both splits; one size by the transforms."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision import datasets
from torchvision.transforms.v2.functional import pil_to_tensor

from hookrun.data import Split, describe, load
from hookrun.data.image_folder import ImageFolder, ImageNet
from hookrun.data.info import TensorInfo
from hookrun.data.samples import Samples
from hookrun.data.settings import Data
from hookrun.errors import HookrunError, Problem, SpecError

RESIZE = {"resize": {"size": [4, 6]}}


@pytest.fixture
def split_root(tmp_path: Path, write_images: Any) -> Path:
    """Classes b and a, three images each for training, one each for validation."""
    for name in ("b", "a"):
        write_images(tmp_path / "train" / name, 3)
        write_images(tmp_path / "val" / name, 1)
    return tmp_path


@pytest.fixture
def flat_root(tmp_path: Path, write_images: Any) -> Path:
    """Ten images of class a, five of class b, and no splits."""
    write_images(tmp_path / "a", 10)
    write_images(tmp_path / "b", 5)
    return tmp_path


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_description_fits_the_loaded_samples(split_root: Path, split: Split) -> None:
    config = section(split_root)
    info = describe(config, split)
    assert info.num_classes == 2
    assert info.sizes == {"train": None, "val": None}
    samples = load(config, split, seed=0)
    for i in range(len(samples)):
        value, target = samples[i]
        assert isinstance(value, torch.Tensor)
        assert (value.shape, value.dtype) == (info.shape, info.dtype) == ((3, 4, 6), torch.float32)
        assert info.target == TensorInfo((), torch.int64) == TensorInfo(target.shape, target.dtype)


def test_samples_are_ordered_by_class_then_file_name(split_root: Path) -> None:
    samples = pickle.loads(
        pickle.dumps(load(section(split_root), "train", seed=0))
    )  # as for worker processes
    assert labels(samples) == [0, 0, 0, 1, 1, 1]
    levels = [float(torch.as_tensor(samples[i][0]).max()) * 255 for i in range(6)]
    assert levels == pytest.approx([0, 1, 2, 0, 1, 2])


def test_a_single_root_is_split_class_by_class(flat_root: Path) -> None:
    config = section(flat_root, val_fraction=0.4)
    train = load(config, "train", seed=0)
    val = load(config, "val", seed=0)
    assert Counter(labels(train)) == {0: 6, 1: 3}
    assert Counter(labels(val)) == {0: 4, 1: 2}
    assert describe(config).sizes == {"train": None, "val": None}
    again = load(config, "val", seed=1)
    for i in range(6):
        assert torch.equal(torch.as_tensor(val[i][0]), torch.as_tensor(again[i][0]))


@pytest.mark.parametrize(("fraction", "empty", "full"), [(0.0, "val", "train"), (1.0, "train", "val")])
def test_all_of_a_single_root_can_be_one_split(flat_root, fraction: float, empty: Split, full: Split) -> None:
    config = section(flat_root, val_fraction=fraction)
    assert len(load(config, full, seed=0)) == 15
    assert describe(config, full).sizes[empty] == 0
    assert problem(config, empty).where == "data.args.val_fraction"


def test_one_split_suffices_where_only_it_is_used(tmp_path: Path, write_images: Any) -> None:
    write_images(tmp_path / "val" / "a")
    config = section(tmp_path)
    assert describe(config, "val").sizes == {"train": 0, "val": None}
    found = problem(config, "train")
    assert found.where == "data.root"
    assert str(tmp_path / "train") in found.what
    assert found.what.endswith("beside it there is val")


def test_splits_with_different_classes_are_refused(split_root, write_images) -> None:
    write_images(split_root / "train" / "aa")
    found = problem(section(split_root))
    assert found.what.endswith("differ in their class folders, hence in their labels: aa")


@pytest.mark.parametrize(
    ("name", "folders", "said"),
    [
        ("image_folder", ["training/a", "testing/a"], "beside it there is testing, training"),
        ("image_folder", [], "the data set 'image_folder' finds no class folders in {root}"),
        ("image_folder", ["train"], "the data set 'image_folder' finds no class folders in {root}/train"),
        ("imagenet", ["a", "b"], "has no folder {root}/train; beside it there is a, b"),
    ],
)
def test_folders_that_hold_no_splits_are_refused(tmp_path, name: str, folders: list[str], said: str) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    found = problem(section(tmp_path, name))
    assert found.where == "data.root"
    assert found.what.endswith(said.format(root=tmp_path))
    assert (name == "imagenet") == ("torchvision.datasets.ImageNet" in found.hint)


def test_a_class_without_images_is_named_before_loading(split_root, write_images) -> None:
    for part in ("train", "val"):
        (split_root / part / "empty").mkdir()
    found = problem(section(split_root))
    assert found.where == "data.root"
    assert found.what == f"{split_root / 'train'}: there are no images in empty"
    write_images(split_root / "train" / "empty" / "deeper")
    assert describe(section(split_root)).num_classes == 3
    assert problem(section(split_root), "val").what.startswith(f"{split_root / 'val'}: ")


def test_a_description_reads_no_image(split_root: Path) -> None:
    for path in split_root.rglob("*.png"):
        path.write_bytes(b"no image")
    assert describe(section(split_root)).shape == (3, 4, 6)
    with pytest.raises(SpecError) as caught:
        describe(Data(name="image_folder", root=str(split_root)))
    assert [p.where for p in caught.value.errors] == ["data.transforms"]


@pytest.mark.parametrize("content", [b"no image", None])
def test_a_damaged_image_is_an_error_that_names_the_file(split_root: Path, content: bytes | None) -> None:
    path = split_root / "train" / "a" / "001.png"
    path.write_bytes(path.read_bytes()[:-30] if content is None else content)
    samples = load(section(split_root), "train", seed=0)
    assert torch.as_tensor(samples[0][0]).shape == (3, 4, 6)
    with pytest.raises(HookrunError, match="cannot be read as an image") as caught:
        samples[1]
    assert str(path) in str(caught.value)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
RUNS_OR_READS_ELSEWHERE = {
    "EPS": EPS,
    "EPS of DOS": b"\xc5\xd0\xd3\xc6" + (30).to_bytes(4, "little") + bytes(22) + EPS,
    "FITS": b"SIMPLE  =                    T" + b" " * 3000,
    "WMF": b"\xd7\xcd\xc6\x9a" + bytes(100),
}


@pytest.mark.parametrize("kind", RUNS_OR_READS_ELSEWHERE)
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".ppm"])
def test_only_pixels_are_decoded_whatever_an_image_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, suffix: str
) -> None:
    ran = tmp_path / "ran"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / f"1{suffix}").write_bytes(RUNS_OR_READS_ELSEWHERE[kind])
    with pytest.raises(HookrunError, match="cannot be read as an image"):
        load(section(tmp_path / "data", val_fraction=0), "train", seed=0)[0]
    assert not ran.exists()


def test_an_image_beyond_max_pixels_is_not_decoded(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number, side in enumerate((10, 20_000)):  # Pillow itself warns of the second
        Image.new("1", (side, side)).save(tmp_path / "a" / f"{number}.png")
    for index, args in ((0, {"max_pixels": 99}), (1, {})):
        samples = load(section(tmp_path, val_fraction=0, **args), "train", seed=0)
        with pytest.raises(HookrunError, match=r"larger than data\.args\.max_pixels"):
            samples[index]
    samples = load(section(tmp_path, val_fraction=0, max_pixels=100), "train", seed=0)
    assert torch.as_tensor(samples[0][0]).shape == (3, 4, 6)


def test_links_that_lead_back_are_followed_once(split_root: Path, write_images: Any) -> None:
    write_images(split_root / "train" / "a" / "below", 1)
    expected = files(load(section(split_root), "train", seed=0))
    for number in range(20):
        (split_root / "train" / "a" / f"self{number}").symlink_to(".")
        (split_root / "train" / "a" / "below" / f"up{number}").symlink_to("../..")
        (split_root / "train" / "b" / f"x{number}").symlink_to(f"x{number}")
    assert files(load(section(split_root), "train", seed=0)) == expected


def test_imagenet_has_all_its_classes_by_default(split_root: Path) -> None:
    found = problem(section(split_root, "imagenet"))
    assert found.where == "data.args.classes"
    assert found.what == f"{split_root / 'train'} has 2 class folders, where 1000 are expected"
    for classes in (2, None):
        config = section(split_root, "imagenet", classes=classes)
        assert describe(config).num_classes == 2
        assert labels(load(config, "val", seed=0)) == [0, 1]


def test_images_directly_in_the_root_are_samples_without_labels(tmp_path: Path, write_images: Any) -> None:
    root = tmp_path / "root"
    write_images(root, 3)
    config = section(root)
    assert describe(config, "val").target is None
    assert describe(config, "val").sizes == {"train": 0, "val": 3}
    samples = load(config, "val", seed=0)
    assert [samples.file(i) for i in range(3)] == sorted(path.name for path in root.iterdir())
    for i in range(3):
        assert samples[i][1].numel() == 0
    found = problem(config)
    assert "no class folders" in found.what
    assert "for task=predict images directly in DIR" in str(found.hint)
    (root / "other").mkdir()  # then a folder of a class may be meant
    assert "there are no images in other" in problem(config).what or "no folder" in problem(config).what


# ---- depth, orientation, frames ----------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """An empty folder of one class."""
    folder = tmp_path / "val" / "a"
    folder.mkdir(parents=True)
    return folder


def pixels_of(folder: Path, **args: Any) -> dict[str, torch.Tensor]:
    """File -> its pixels, without transforms."""
    config = Data(name="image_folder", root=str(folder.parents[1]), args=args, collate="list")
    samples = load(config, "val", seed=0)
    return {Path(samples.file(number)).name: samples[number][0] for number in range(len(samples))}  # type: ignore[misc]


GREY = np.array([[0, 1, 255, 256], [4095, 32768, 65534, 65535]], dtype=np.uint16)
COLOURS = Image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3)


def test_16_bit_grey_is_divided_by_65535(pictures: Path) -> None:
    Image.fromarray(GREY).save(pictures / "little.tiff")
    Image.fromarray(GREY).save(pictures / "grey.png")
    Image.frombytes("I;16B", (4, 2), GREY.astype(">u2").tobytes()).save(pictures / "big.tiff")
    (pictures / "grey.pgm").write_bytes(b"P5 4 2 65535\n" + GREY.astype(">u2").tobytes())
    expected = torch.from_numpy(GREY.astype(np.float32) / np.float32(65535)).expand(3, -1, -1)
    found = pixels_of(pictures)
    assert sorted(found) == ["big.tiff", "grey.pgm", "grey.png", "little.tiff"]
    for name, pixels in found.items():
        assert torch.equal(pixels, expected), name


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_of_32_bits_are_refused_by_file_name(pictures: Path, dtype: type) -> None:
    Image.fromarray(GREY.astype(dtype)).save(pictures / "deep.tiff")
    mode = {np.int32: "I", np.float32: "F"}[dtype]
    with pytest.raises(
        HookrunError, match=rf"deep\.tiff cannot be read as an image: its mode {mode} has 32 bits"
    ):
        pixels_of(pictures)


def test_the_plan_refuses_images_of_32_bits_that_it_opens(pictures: Path) -> None:
    Image.fromarray(GREY.astype(np.float32)).save(pictures / "deep.tiff")
    with pytest.raises(SpecError, match=r"data.root: .*deep\.tiff cannot be read as an image: its mode F"):
        list(
            describe(
                Data(name="image_folder", root=str(pictures.parents[1]), transforms=RESIZE), "val"
            ).remarks()
        )


@pytest.mark.parametrize("ending", ["jpg", "png", "tiff", "webp"])
def test_orientation_is_applied_as_pillow_does(pictures: Path, ending: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        COLOURS.save(pictures / f"{orientation}.{ending}", exif=exif)
        if ending == "png":
            Image.fromarray(GREY).save(pictures / f"{orientation}grey.png", exif=exif)
    upright = pixels_of(pictures)
    stored = pixels_of(pictures, exif=False)
    as_torchvision = datasets.ImageFolder(str(pictures.parent))
    for (path, _), (image, _) in zip(as_torchvision.samples, as_torchvision, strict=True):
        name = Path(path).name
        with Image.open(path) as file:
            turned = ImageOps.exif_transpose(file)
        if name.endswith("grey.png"):
            expected = torch.from_numpy(np.asarray(turned).astype(np.float32)) / 65535
            assert torch.equal(upright[name], expected.expand(3, -1, -1)), name
            continue
        assert torch.equal(upright[name], pil_to_tensor(turned.convert("RGB")).float() / 255), name
        assert torch.equal(stored[name], pil_to_tensor(image).float() / 255), name


def test_a_damaged_exif_block_can_be_ignored(pictures: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    COLOURS.save(pictures / "x.webp", exif=exif)
    content = (pictures / "x.webp").read_bytes()
    assert content.count(b"MM\x00*") == 1
    (pictures / "x.webp").write_bytes(content.replace(b"MM\x00*", b"MM\x00x"))
    with pytest.raises(
        HookrunError, match=r"x\.webp .*its EXIF block is damaged .* data\.args\.exif=false ignores it"
    ):
        pixels_of(pictures)
    assert pixels_of(pictures, exif=False)["x.webp"].shape == (3, 4, 6)


def test_lines_of_the_plan_count_what_was_opened(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remarks(**args: Any) -> list[str]:
        config = Data(name="image_folder", root=str(pictures.parents[1]), args=args, transforms=RESIZE)
        return list(describe(config, "val").remarks())

    for number in range(3):
        COLOURS.save(pictures / f"{number}.png")
    (pictures / "broken.png").write_bytes(b"no image")
    assert remarks() == []
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    COLOURS.save(pictures / "x.jpg", exif=exif)
    for name in ("y.png", "z.tiff"):
        COLOURS.save(pictures / name, save_all=True, append_images=[COLOURS.rotate(180)])
    assert remarks() == [
        "EXIF orientation in 1 of 7 images opened (7 in all): applied; data.args.exif=false changes that",
        "several frames in 2 of 7 images opened (7 in all): the first is read",
    ]
    assert "not applied; data.args.exif=true" in remarks(exif=False)[0]
    (pictures / "notes.txt").touch()
    for name in ("a.gif", "b.GIF"):
        COLOURS.save(pictures / name)
    assert remarks()[2:] == ["2 .gif images are left out, as torchvision's ImageFolder does"]
    for name in ("a.gif", "b.GIF"):
        (pictures / name).unlink()
    monkeypatch.setattr("hookrun.data.image_folder._MOST_OPENED", 3)
    assert remarks() == ["several frames in 1 of 3 images opened (7 in all): the first is read"]
    first = pil_to_tensor(COLOURS).float() / 255
    (pictures / "broken.png").unlink()
    for name in ("y.png", "z.tiff"):
        assert torch.equal(pixels_of(pictures)[name], first)


def test_images_of_different_sizes_can_stay_as_they_are_in_lists(pictures: Path) -> None:
    for height in (4, 5):
        COLOURS.resize((6, height)).save(pictures / f"{height}.png")
    config = Data(
        name="image_folder", root=str(pictures.parents[1]), transforms={"grayscale": None}, collate="list"
    )
    assert describe(config, "val").shape == (1, -1, -1)
    with pytest.raises(SpecError, match="the images come in different sizes"):
        describe(config.model_copy(update={"collate": "stack"}), "val")
    assert describe(config.model_copy(update={"transforms": RESIZE}), "val").shape == (3, 4, 6)


def test_imagenet_is_read_as_torchvision_reads_it() -> None:
    assert ImageNet().exif is False
    assert ImageFolder().exif is True


def section(root: Path, name: str = "image_folder", **args: Any) -> Data:
    return Data(name=name, root=str(root), args=args, transforms=RESIZE)


def problem(config: Data, split: Split = "train") -> Problem:
    """The problem, which is the same when describing and when loading."""
    found = []
    for use in (lambda: describe(config, split), lambda: load(config, split, seed=0)):
        with pytest.raises(SpecError) as caught:
            use()
        found += caught.value.errors
    assert len(found) == 2
    assert found[0] == found[1]
    return found[0]


def labels(samples: Samples) -> list[int]:
    return [int(samples[i][1]) for i in range(len(samples))]


def files(samples: Samples) -> list[str]:
    return [samples.file(i) for i in range(len(samples))]

"""Data by name: its file in conf/data, and every mistake of the section at once, before anything is read."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchvision.datasets import mnist

from hookrun import data
from hookrun.data import Split, describe, load, names
from hookrun.data.settings import Data
from hookrun.data.source import Source
from hookrun.data.transforms import parse_transforms
from hookrun.errors import Problem, SpecError

NORMALIZE = {"mean": [0.5], "std": [0.5]}


def problems(split: Split = "train", **section: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        describe(Data(**section), split)
    return caught.value.errors


def test_an_unknown_name_is_reported_with_the_nearest() -> None:
    expected = [Problem("data.name", "unknown data set 'cifar'", "did you mean 'cifar10' or 'cifar100'?")]
    assert problems(name="cifar") == expected
    with pytest.raises(SpecError) as caught:
        load(Data(name="cifar"), "train", seed=0)
    assert caught.value.errors == expected


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    found = problems(
        name="mnist",
        root=str(tmp_path),
        transforms={"normalise": NORMALIZE},
        train_transforms={"resize": {"size": "big"}},
    )
    where = [problem.where.removeprefix("data.") for problem in found]
    assert where == ["transforms.normalise", "train_transforms.resize.size", "root"]


def test_misfits_of_both_splits_are_found_once_each() -> None:
    three = {"mean": [0, 0, 0], "std": [1, 1, 1]}
    crop = {"random_crop": {"size": 9}}
    both = problems(name="digits", transforms={"normalize": three}, train_transforms=crop)
    assert [each.where for each in both] == ["data.transforms.normalize", "data.train_transforms.random_crop"]
    assert [each.where for each in problems(name="digits", transforms=crop)] == [
        "data.transforms.random_crop"
    ]


def test_a_root_is_shown_as_the_absolute_path_looked_at(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for root in ("~/mine", "mine"):
        (problem,) = problems(name="image_folder", root=root)
        assert str(tmp_path / "mine") in problem.what


def test_the_train_split_has_transforms_of_its_own_where_given() -> None:
    none = Data(name="digits", train_transforms={}, transforms={"flatten": {}})
    assert describe(none, "train").shape == (1, 8, 8)
    assert describe(none, "val").shape == (64,)
    config = Data(
        name="digits", train_transforms={"random_crop": {"size": 4}}, transforms={"center_crop": {"size": 6}}
    )
    for split, shape in (("train", (1, 4, 4)), ("val", (1, 6, 6))):
        assert describe(config, split).shape == shape  # type: ignore[arg-type]
        value, _ = load(config, split, seed=0)[0]  # type: ignore[arg-type]
        assert isinstance(value, torch.Tensor)
        assert value.shape == shape


def test_a_file_that_cannot_be_opened_is_a_config_error(mnist_root, monkeypatch) -> None:
    (problem,) = problems(name="imagenet", root=str(mnist_root / ("x" * 300)))
    assert problem.where == "data.root"
    assert "x" * 300 in problem.what

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(mnist, "read_image_file", refuse)
    (problem,) = problems(name="mnist", root=str(mnist_root))
    assert problem.where == "data.root"
    assert problem.hint == "make it readable, or give another path"
    assert problem.what == f"{mnist_root / 'MNIST/raw/train-images-idx3-ubyte'}: Permission denied"


FOLDER = Path(__file__).resolve().parents[2] / "conf" / "data"


def content(name: str) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"), resolve=True)
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def test_data_sets_have_one_file_each() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(names())


@pytest.mark.parametrize("name", names())
def test_the_file_of_a_data_set_shows_every_key(name: str) -> None:
    own = set() if name == "python" else {"factory"}
    assert set(content(name)) == set(Data.model_fields) - own
    section = Data(**content(name))
    assert section.name == name
    assert section.batch_size == 64
    assert re.match("# [^@]", (FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))

    for transforms in (section.transforms, section.train_transforms or {}):
        assert [*parse_transforms(transforms, "data.transforms")] == [*transforms]


@pytest.mark.parametrize("name", data._SOURCES)
def test_it_lists_all_arguments_at_their_defaults(name: str) -> None:
    module, cls = data._SOURCES[name]
    source: type[Source] = getattr(import_module(f"hookrun.data.{module}"), cls)
    assert source.name == name
    assert content(name)["args"] == {
        key: field.get_default(call_default_factory=False) for key, field in source.model_fields.items()
    }

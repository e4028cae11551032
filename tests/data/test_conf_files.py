"""Each data set has its file in conf/data, which lists every key."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun import data
from hookrun.data import names
from hookrun.data.source import Source
from hookrun.data.transforms import parse_transforms
from hookrun.spec.experiment import Data

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "data"


def content(name: str) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"), resolve=True)
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def test_there_is_a_file_for_each_data_set_and_no_other() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(names())


@pytest.mark.parametrize("name", names())
def test_it_names_its_data_set_and_shows_every_key(name: str) -> None:
    own = set() if name == "python" else {"factory"}
    assert set(content(name)) == set(Data.model_fields) - own
    section = Data(**content(name))
    assert (section.name, section.batch_size) == (name, 64)


@pytest.mark.parametrize("name", names())
def test_it_begins_with_a_comment_on_the_data(name: str) -> None:
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first[2] != "@"


@pytest.mark.parametrize("name", data._SOURCES)
def test_it_lists_all_arguments_at_their_defaults(name: str) -> None:
    module, cls = data._SOURCES[name]
    source: type[Source] = getattr(import_module(f"hookrun.data.{module}"), cls)
    assert content(name)["args"] == {
        key: field.get_default(call_default_factory=False) for key, field in source.model_fields.items()
    }


@pytest.mark.parametrize("name", names())
def test_its_transforms_are_valid(name: str) -> None:
    section = Data(**content(name))
    for transforms in (section.transforms, section.train_transforms or {}):
        assert parse_transforms(transforms, "data.transforms")[1] == []

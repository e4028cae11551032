"""The YAML files of a run directory, read with the same checks as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.errors import SpecError
from hookrun.store.files import StoreError
from hookrun.store.stored_config import data_used, read_yaml


def test_interpolations_stay(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert read_yaml(path, tmp_path) is None
    path.write_text("a: ${seed}\nb: [1]\n")
    assert read_yaml(path, tmp_path) == {"a": "${seed}", "b": [1]}
    path.write_text("")
    assert read_yaml(path, tmp_path) == {}


def test_plain_values_are_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content in ({"a": [1, 0.5, None, True, "off", "1e3", "x: y\n z", {}]}, {"1": "null"}, []):
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        assert read_yaml(path, tmp_path) == content


CONFIG: dict[str, Any] = {
    "task": {"split": "val"},
    "seed": 3,
    "data": {"name": "digits", "batch_size": "${n}"},
    "n": 8,
}


def test_the_data_of_a_stored_configuration_is_checked_and_resolved() -> None:
    data, split, seed = data_used(CONFIG, Path("run"))
    assert (data.name, data.batch_size, split, seed) == ("digits", 8, "val", 3)
    for task in ({}, {"split": "all"}):
        assert data_used(CONFIG | {"task": task}, Path("run"))[1] == "train"


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"seed": True}, StoreError, "does not say which data was used"),
        ({"task": None}, StoreError, "does not say which data was used"),
        ({"task": {"split": "test"}}, StoreError, "does not say which data was used"),
        ({"data": {"name": "digits", "batch_size": "${nowhere}"}}, StoreError, "data cannot be resolved"),
        ({"data": {"name": "digits", "batch": 3}}, SpecError, "data.batch"),
        ({"data": None}, SpecError, "data"),
    ],
)
def test_data_that_no_experiment_could_name_is_refused(
    change: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        data_used(CONFIG | change, Path("run"))

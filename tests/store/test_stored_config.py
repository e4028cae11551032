"""The YAML files of a run directory, read with the same checks as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hookrun.store.config.stored import data_used, read_yaml


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


def test_a_stored_configuration_is_resolved() -> None:
    data, split, seed = data_used(CONFIG, Path("run"))
    assert data.name == "digits"
    assert data.batch_size == 8
    assert split == "val"
    assert seed == 3
    for task in ({}, {"split": "all"}):
        assert data_used(CONFIG | {"task": task}, Path("run"))[1] == "train"

"""Composing from Python gives the configuration that the command line would run, as plain data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from hookrun.compose.compose import compose_dict
from hookrun.compose.hydra import conf_dir
from hookrun.errors import SpecError
from hookrun.tasks import parse_experiment

Conf = Callable[..., str]


def test_an_experiment_is_plain_data_without_hydras_part() -> None:
    config = compose_dict(["experiment=clip_fc", "seed=3"])
    assert config["hooks"] == {
        "clip_fc": {"select": "fc", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01}
    }
    assert config["seed"] == 3
    roots = {"task", "model", "data", "train", "compute", "hooks", "seed", "strict", "objective", "tags"}
    assert set(config) == roots | {"baseline", "hooked"}


def test_the_defaults_are_a_valid_experiment_without_hooks() -> None:
    experiment = parse_experiment(compose_dict())
    assert experiment.hooks.hooks == ()
    assert (experiment.settings.task.name, experiment.settings.model.name) == ("train", "cnn")


def test_interpolations_are_resolved(conf: Conf) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\nseed: 4\ntrain: {epochs: '${seed}'}\n"})
    assert compose_dict(["experiment=mine"], folder)["train"]["epochs"] == 4


def test_it_writes_no_files(cwd: Path) -> None:
    compose_dict(["experiment=clip_fc"])
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(
    "overrides", [["experiment=clip_fx"], ["seed=${nowhere}"], ["a"], ["seed=1,2"]], ids=str
)
def test_mistakes_raise_spec_errors(overrides: list[str]) -> None:
    with pytest.raises(SpecError):
        compose_dict(overrides)


def test_a_missing_folder_raises_a_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(f"config_dir: there is no folder {tmp_path}/nowhere")):
        compose_dict(config_dir=tmp_path / "nowhere")


def test_it_works_inside_an_application_that_uses_hydra_itself(conf: Conf) -> None:
    with initialize_config_dir(conf(config="theirs: 1\n"), version_base="1.3"):
        assert compose_dict(["seed=3"])["seed"] == 3
        assert compose("config").theirs == 1


def test_conf_is_beside_the_package_in_a_checkout() -> None:
    assert (conf_dir() / "config.yaml").is_file()
    assert conf_dir().is_absolute()

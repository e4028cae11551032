"""The bridge to Hydra: the state that it restores, and the state that it sends to other processes."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.types import RunMode
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.compose.hydra import conf_dir, opened
from hookrun.errors import SpecError

Conf = Callable[..., str]


def test_hydras_state_is_restored_even_after_an_exception() -> None:
    with pytest.raises(KeyError), opened(conf_dir()) as app:
        HydraConfig.instance().set_config(app.compose_config("config", [], RunMode.RUN))
        raise KeyError
    assert not GlobalHydra.instance().is_initialized()
    assert not HydraConfig.initialized()


def test_folders_are_searched_in_the_order_given_and_the_main_one_last(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with opened(conf_dir(), first, second) as app:
        assert app.folders() == [first, second, conf_dir()]


@pytest.mark.parametrize("sweep", [False, True])
def test_a_full_disk_is_not_a_wrong_configuration_and_its_folder_is_named(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], notes, sweep: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hydra.core.utils._save_config", full)
    typed = ["-m", "seed=5,6", "hydra.sweep.dir=mine"] if sweep else ["seed=5", "hydra.run.dir=mine"]
    assert main(typed) == 1
    said = "cannot write Hydra's files in mine: No space left on device"
    assert said in capsys.readouterr().err


def test_a_checked_configuration_is_not_composed_again(tmp_path: Path) -> None:
    """The value of `${now:…}` was resolved by the check; a second composition would give another time."""
    seen = []
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", ["hydra.mode=RUN", "model.weights=${now:%f}"], RunMode.RUN)
        cfg.hydra.run.dir = str(tmp_path / "run")
        checked = cfg.model.weights
        app.run_checked(cfg, lambda job: seen.append(job.model.weights))
    assert seen == [checked]
    assert (tmp_path / "run/.hydra/config.yaml").is_file()


def test_options_include_subgroups(conf: Conf) -> None:
    folder = conf(**{"experiment/a": "", "experiment/b/c": ""})
    with opened(Path(folder)) as app:
        assert app.options("experiment") == ["a", "b/c"]


@pytest.mark.parametrize("typed", ["seed=1,2", "seed=range(1,3)"])
def test_the_jobs_of_a_sweep_are_listed_before_it_starts(typed: str) -> None:
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", [typed, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        jobs = app.jobs(cfg)
        assert jobs == [["seed=1"], ["seed=2"]]
        assert [app.job_config(cfg, job, number).seed for number, job in enumerate(jobs)] == [1, 2]


def test_the_state_is_sent_to_the_processes_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As launchers do it: copied in one process, and set in another one that has loaded Hydra's plugins."""
    monkeypatch.setattr(Singleton, "_instances", copy.copy(Singleton._instances))
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        loader = pickle.loads(pickle.dumps(app.config_loader))
        Singleton.set_state(Singleton.get_state())
        assert loader.load_sweep_config(cfg, ["seed=7"]).seed == 7


def test_a_broken_file_is_named(conf: Conf) -> None:
    folder = conf(**{"experiment/mine": "a: *b\n"})
    with (
        opened(conf_dir(), Path(folder)) as app,
        pytest.raises(SpecError, match=r"experiment/mine\.yaml:1:4"),
    ):
        app.compose_config("config", ["experiment=mine"], RunMode.RUN)


def test_the_configuration_of_a_job_has_its_number() -> None:
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        assert OmegaConf.select(app.job_config(cfg, ["seed=1"], 4), "hydra.sweep.subdir") == "4"


def test_a_folder_with_a_link_to_itself_is_listed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/one.yaml").write_text("a: 1\n")
    (tmp_path / "round").symlink_to(".")
    with opened(conf_dir(), tmp_path) as app:
        groups = app.list_all_config_groups()
    assert {"mine", "experiment", "hydra/launcher"} <= {*groups}
    assert max(group.count("/") for group in groups) == 1

"""The jobs of a sweep: which a launcher of other processes gets, by which hash each is known, how often composed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.command.compose.hydra import BasicLauncher
from hookrun.command.compose.loader import Loader
from hookrun.command.sweeps import composed_jobs
from hookrun.command.sweeps.composed_jobs import hash_of
from hookrun.command.sweeps.launching import interrupted


class Elsewhere(BasicLauncher):
    """A launcher that gets overrides, and composes each job again, as those of other processes do."""

    __module__ = "hydra_plugins.elsewhere"
    calls: list[tuple[int, list[list[str]]]] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        self.calls.append((initial_job_idx, [list(each) for each in job_overrides]))
        return super().launch(job_overrides, initial_job_idx)


@pytest.fixture
def launched(plugin, conf, notes) -> Callable[..., list[tuple[int, list[list[str]]]]]:
    """Run a sweep that must end with `code`; returns the number of the first job and the jobs of each call."""
    plugin(Elsewhere)
    folder = conf(**{"hydra/launcher/elsewhere": "_target_: hydra_plugins.elsewhere.Elsewhere\n"})

    def launched(*typed: str, code: int = 0) -> list[tuple[int, list[list[str]]]]:
        Elsewhere.calls = []
        assert main(["-m", "--config-dir", folder, "hydra/launcher=elsewhere", *typed]) == code
        return Elsewhere.calls

    return launched


def test_known_jobs_are_launched_once_in_batches(launched, notes) -> None:
    swept = ("experiment=clip_fc", "hooks.clip_fc.max=0.1,0.2,0.3,0.4", "baseline=true")
    calls = launched(*swept, "hydra.sweeper.max_batch_size=3")
    assert [(first, len(jobs)) for first, jobs in calls] == [(0, 3), (3, 2)]
    assert [bool(job.hooks.hooks) for job, _ in notes.prepared] == [False, True, True, True, True]


def test_of_a_resumed_sweep_only_unfinished_jobs_run(launched, notes, cwd) -> None:
    launched("seed=3,1,9", "hydra.sweep.dir=mine", code=1)
    notes.ran.clear()
    notes.mended = True
    ((first, jobs),) = launched("seed=1,7,3,8", "resume=mine", code=3)
    places = ((1, 1), (8, 3), (7, 4))
    assert first == 1
    assert jobs == [[f"seed={seed}", f"hydra.sweep.subdir='{name}'"] for seed, name in places]
    assert notes.ran == [(seed, cwd / f"mine/{name}") for seed, name in places]


def test_numbers_have_no_gaps_in_one_call(launched) -> None:
    numbered = "tags=['n${hydra:job.num}']"
    launched("seed=5,1,6", numbered, "hydra.sweep.dir=mine", code=1)
    assert [first for first, _ in launched("seed=5,1,6,7", numbered, "resume=mine", code=1)] == [1, 3]


def test_of_an_interrupted_sweep_without_any_job_that_is_told(tmp_path) -> None:
    said = interrupted(KeyboardInterrupt(), tmp_path, [])
    assert said == f"sweep: interrupted: no job started, in {tmp_path}"


def test_the_hash_is_of_what_is_written_in_any_order() -> None:
    def hashed(**users: object) -> str:
        return hash_of(OmegaConf.create(users))

    assert hashed(a=1, b=2) == hashed(b=2, a=1) != hashed(a=1, b=3)
    assert hashed(a=1, hooked=True) == hashed(a=1) != hashed(a=1, hooked=False)
    assert hashed(a="${hydra:job.num}", hydra={"job": 3}) == hashed(a="${hydra:job.num}", hydra={"job": 4})


@pytest.mark.parametrize("kept", [1_000, 1])
def test_each_job_is_composed_once(kept: int, notes, monkeypatch) -> None:
    composed = list[Any]()
    load = Loader.load_sweep_config

    def noted(self: Loader, master: Any, overrides: list[str]) -> Any:
        composed.append(overrides[-1])
        return load(self, master, overrides)

    monkeypatch.setattr(Loader, "load_sweep_config", noted)
    monkeypatch.setattr(composed_jobs, "MOST_KEPT", kept)
    assert main(["-m", "experiment=clip_fc", "seed=5,6,7"]) == 0
    again = [] if kept > 2 else ["seed=6", "seed=7"] * 2  # to validate it, and to run it
    assert sorted(composed) == sorted(["seed=5", "seed=6", "seed=7", *again])
    assert [seed for seed, _ in notes.ran] == [5, 6, 7]

"""A run or job in its directory, and how a command reports its end."""

from __future__ import annotations

import gc
import re
import signal
import sys
import tomllib
import weakref
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.command.sweeps.exit_codes import NEEDED, exit_code, report
from hookrun.command.sweeps.jobs import SweepJob
from hookrun.errors import HookError
from hookrun.signals import Interrupted
from hookrun.store.reader import open_run


class TestFailedRun:
    def test_the_traceback_of_an_error_is_saved(self, cwd, notes, capsys) -> None:
        assert main(["seed=1"]) == 1
        run = (cwd / "outputs/latest").resolve()
        places = [f"run directory: {run}", f"traceback: {run / 'error.txt'}"]
        assert capsys.readouterr().err.splitlines() == ["RuntimeError: out of luck", *places]
        kept = (run / "error.txt").read_text()
        assert kept.startswith("Traceback (most recent call last):")
        assert kept.endswith("RuntimeError: out of luck\n")

    def test_the_traceback_is_shown_on_request(self, notes, capsys, monkeypatch) -> None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        assert main(["seed=1"]) == 1
        assert "Traceback (most recent call last):" in capsys.readouterr().err

    def test_a_failed_check_has_no_traceback(self, cwd: Path, notes, capsys) -> None:
        assert main(["seed=4"]) == 3
        run = (cwd / "outputs/latest").resolve()
        said = ["hook nan_hunt at conv1: found inf", f"run directory: {run}"]
        assert capsys.readouterr().err.splitlines() == said
        assert not (run / "error.txt").exists()

    def test_an_interrupted_run_prints_its_directory(self, cwd: Path, notes, capsys) -> None:
        assert main(["seed=130"]) == 130
        run = (cwd / "outputs/latest").resolve()
        assert capsys.readouterr().err.splitlines() == ["interrupted", f"run directory: {run}"]

    def test_a_model_that_calls_sys_exit_fails_like_any_other(self, notes, monkeypatch, capsys) -> None:
        def leave(prepared: object, run_dir: Path) -> int:
            raise SystemExit(0)

        monkeypatch.setattr("hookrun.run.execute.execute", leave)
        assert main(["-m", "seed=5,6"]) == 1
        assert capsys.readouterr().out.count("exit code 1") == 2


def test_an_error_before_the_directory_shows_its_traceback(notes, monkeypatch, capsys) -> None:
    def prepare(experiment: object, *, trust: frozenset[str]) -> object:
        raise ZeroDivisionError("in the model")

    monkeypatch.setattr("hookrun.run.tasks.prepare", prepare)
    assert main(["seed=5"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last):" in printed
    assert printed.endswith("ZeroDivisionError: in the model\n")


def test_the_memory_of_a_job_is_freed_before_the_next(notes, monkeypatch) -> None:
    class Held:
        """Stands for a model that its hooks refer to in a reference cycle."""

        def __init__(self) -> None:
            self.itself = self

    alive: list[weakref.ref[Held]] = []

    def prepare(experiment: object, *, trust: frozenset[str]) -> Held:
        assert [ref() for ref in alive if ref() is not None] == []
        held = Held()
        alive.append(weakref.ref(held))
        return held

    def fail(prepared: Held, run_dir: Path) -> int:
        raise RuntimeError("with the model in its traceback")

    monkeypatch.setattr("hookrun.run.tasks.check_jobs", lambda *_, **__: {})
    monkeypatch.setattr("hookrun.run.tasks.prepare", prepare)
    monkeypatch.setattr("hookrun.run.execute.execute", fail)
    gc.disable()
    try:
        assert main(["-m", "seed=5,6,7"]) == 1
    finally:
        gc.enable()
    assert len(alive) == 3


def test_signals_are_handled_in_the_process_of_any_launcher(monkeypatch, tmp_path: Path) -> None:
    seen = []

    def alone(self: SweepJob, cfg: object, run_dir: Path, sweep_dir: Path) -> int:
        seen.append(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr(SweepJob, "_alone", alone)
    for name in ("_run_dir", "_sweep_dir"):
        monkeypatch.setattr(f"hookrun.command.sweeps.jobs.{name}", lambda: tmp_path)
    with pytest.raises(Interrupted, match="SIGTERM"):
        SweepJob(frozenset())(OmegaConf.create())
    assert seen != [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def interrupted_and_cleaned_up(*_: object, **__: object) -> None:
    """Is interrupted in other code, whose cleanup then fails."""
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        raise AttributeError("no attribute '_set'")


def test_a_job_can_be_interrupted_while_it_is_prepared(cwd, notes, monkeypatch) -> None:
    monkeypatch.setattr("hookrun.run.tasks.check_jobs", lambda *_, **__: {})
    monkeypatch.setattr("hookrun.run.tasks.prepare", interrupted_and_cleaned_up)
    assert main(["-m", "seed=5,6", "hydra.sweep.dir=mine"]) == 143
    assert open_run(cwd / "mine/0").status["status"] == "interrupted"
    assert not Path("mine/1").exists()


def test_an_interruption_outlives_an_error_that_replaces_it(cwd, no_pages, monkeypatch) -> None:
    monkeypatch.setattr("hookrun.run.tasks.predict.PredictTask.execute", interrupted_and_cleaned_up)
    assert main(["compute.device=cpu", "model=mlp", "task=predict", "hydra.run.dir=mine"]) == 143
    assert open_run(cwd / "mine").status["reason"] == "interrupted by SIGTERM"


def test_an_error_that_has_no_exit_code_of_its_own_ends_with_1() -> None:
    assert exit_code(HookError("failed")) == exit_code(MemoryError()) == 1


def test_a_python_without_the_packages_is_told_where_they_are(capsys) -> None:
    report(ModuleNotFoundError("No module named 'hydra'", name="hydra.errors"))
    printed = capsys.readouterr().err
    assert f"{sys.executable} has no module 'hydra'" in printed
    assert "scripts/hookrun" in printed
    assert "Traceback" not in printed
    report(ModuleNotFoundError("No module named 'mine'", name="mine"))
    assert "scripts/hookrun" not in capsys.readouterr().err


def test_modules_of_all_needed_packages_are_known() -> None:
    text = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    asked = tomllib.loads(text)["project"]["dependencies"]
    dependencies = {re.split("[<>=]", each)[0] for each in asked}
    packages = packages_distributions()
    assert {name.lower() for module in NEEDED for name in packages[module]} == dependencies


def test_a_traceback_that_cannot_be_saved_is_shown(tmp_path: Path, capsys) -> None:
    report(RuntimeError("out of luck"), tmp_path / "nowhere")
    printed = capsys.readouterr().err
    assert "traceback: not saved" in printed
    assert printed.startswith("RuntimeError: out of luck")

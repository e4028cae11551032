"""A command line that asks for a run or a plan is composed once, then run or shown, or refused with all mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hookrun.cli import main
from hookrun.cli.hydra import App

SMALL = ["experiment=clip_fc", "train.epochs=1", "train.limit_batches=2", "compute=cpu"]


def status(run: Path) -> tuple[str, int]:
    found = json.loads((run / "status.json").read_text())
    return found["status"], found["exit_code"]


class TestRealRuns:
    def test_an_experiment_trains_and_leaves_its_record(self, cwd: Path) -> None:
        assert main([*SMALL, "hydra.run.dir=run"]) == 0
        assert status(cwd / "run") == ("done", 0)
        assert (cwd / "run/metrics.jsonl").read_text().count("\n") > 1
        assert {"plan.json", "env.json", ".hydra"} <= {path.name for path in (cwd / "run").iterdir()}

    def test_a_plan_is_shown_and_leaves_no_files(self, cwd: Path, capsys) -> None:
        assert main(["experiment=clip_fc", "task=plan"]) == 0
        assert "clip_fc" in capsys.readouterr().out
        assert list(cwd.iterdir()) == []

    def test_modules_are_shown_and_leave_no_files(self, cwd: Path, capsys) -> None:
        assert main(["task=modules", "task.select=conv*"]) == 0
        assert "conv1" in capsys.readouterr().out
        assert list(cwd.iterdir()) == []

    def test_hooks_that_do_not_fit_the_model_are_refused(self, cwd: Path, capsys) -> None:
        assert main([*SMALL, "hooks.clip_fc.select=fd"]) == 2
        printed = capsys.readouterr().err
        assert "hooks.clip_fc" in printed and "fc" in printed and "Traceback" not in printed
        assert list(cwd.iterdir()) == []

    @pytest.mark.parametrize(("policy", "state"), [("stop", "stopped"), ("error", "failed")])
    def test_a_failed_check_exits_with_3(self, policy: str, state: str, cwd: Path) -> None:
        hook = f"+hooks.low={{select: fc, hook: forward, action: check, min: -2000, max: -1000, policy: {policy}}}"
        assert main([*SMALL, hook, "hydra.run.dir=run"]) == 3
        assert status(cwd / "run") == (state, 3)


def test_a_run_is_composed_once_and_a_mode_in_a_file_holds(
    notes, conf, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, real = 0, App.compose_config

    def compose_config(self: App, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += self._checked is None
        return real(self, *args, **options)

    monkeypatch.setattr(App, "compose_config", compose_config)
    assert main(["seed=5"]) == 0 and count == 1
    folder = conf(**{"experiment/mine": "# @package _global_\nhydra: {mode: MULTIRUN}\n"})
    for typed, seeds in ((["seed=6,7"], [6, 7]), (["seed=8", "hydra.mode=RUN"], [8])):
        notes.ran.clear()
        assert main(["--config-dir", folder, "experiment=mine", *typed]) == 0
        assert [seed for seed, _ in notes.ran] == seeds


def test_settings_of_sweeps_are_refused_or_noted_where_there_is_one_run(notes, cwd: Path, capsys) -> None:
    assert main(["seed=5", "fail_fast=true"]) == 2
    assert "fail_fast: is for a sweep, and this is one run" in capsys.readouterr().err
    assert main(["seed=5", "baseline=true"]) == 0
    assert "NOTE: baseline: true is for sweeps (-m)" in capsys.readouterr().out
    assert main(["seed=5", "baseline=true", "task=plan"]) == 0
    assert "NOTE" not in capsys.readouterr().out


def test_a_mistake_on_the_command_line_is_told_before_those_in_files(notes, conf, capsys) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\ntrain: {epochs: x}\n"})
    assert main(["--config-dir", folder, "experiment=mine", "sed=1", "strickt=true"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("2 configuration errors\n") and "train.epochs" not in printed
    assert main(["--config-dir", folder, "experiment=mine", "seed=y"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("2 configuration errors\n") and "train.epochs" in printed
    assert notes.prepared == []


def test_a_run_that_is_done_is_not_resumed_and_what_is_only_shown_cannot_be(notes, cwd: Path, capsys) -> None:
    assert main(["seed=5", "hydra.run.dir=mine"]) == 0
    left = cwd / "mine/checkpoints/state_000001"
    left.mkdir(parents=True)
    assert main(["resume=mine"]) == 0
    assert "mine is done: there is nothing to resume" in capsys.readouterr().out
    assert len(notes.ran) == 1 and not left.exists()
    assert main(["seed=1", "hydra.run.dir=failed"]) == 1
    capsys.readouterr()
    assert main(["resume=failed", "task=plan"]) == 2
    assert "task=plan does not make a run that could be resumed" in capsys.readouterr().err

"""A command line that asks for a run or a plan is composed once, then run or shown, or refused with all mistakes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hookrun.cli import main
from hookrun.cli.running import RefusedByMain, agreed, ranks_of
from hookrun.compose.hydra import App
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.ranks.alone import ALONE
from hookrun.tasks import parse_experiment

SMALL = ["experiment=clip_fc", "train.epochs=1", "train.limit_batches=2", "compute=cpu"]
SECTIONS = {"model": {"name": "mlp"}, "data": {"name": "digits"}}


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


class Two:
    """One of two ranks, with a given answer of the other rank."""

    several = True

    def __init__(self, rank: int, other: list[Any] | None) -> None:
        self.is_main, self._rank, self._other = rank == 0, rank, other

    def gathered(self, mine: Any) -> list[Any]:
        return [mine, self._other] if self._rank == 0 else [self._other, mine]


def test_a_run_without_a_strategy_is_one_process_and_several_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks_of(parse_experiment(SECTIONS)) as ranks:
        assert ranks is ALONE
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError), ranks_of(parse_experiment(SECTIONS)):
        pytest.fail("each of two processes would do the whole run")


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_wait_for_each_other_at_their_end_unless_one_failed(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = list[bool]()
    group = SimpleNamespace(failed=failed, meet=lambda: met.append(True), failures_told=nullcontext)
    monkeypatch.setattr("hookrun.ranks.group.joined", lambda *_: nullcontext(group))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    compute = {"strategy": "ddp", "device": "cpu"}
    with ranks_of(parse_experiment({**SECTIONS, "compute": compute})) as ranks:
        assert ranks is group and not met
    assert met == ([] if failed else [True])


def test_a_failure_on_one_rank_is_raised_by_all_and_reported_once() -> None:
    refusal = SpecError([Problem("a", "is wrong")])
    ranks: Any = Two(0, ["b", 1])
    with pytest.raises(SpecError), agreed(ranks):
        raise refusal
    with pytest.raises(HookrunError, match="rank 1 cannot run the experiment") as told, agreed(ranks):
        pass
    assert "\nb" in str(told.value)
    ranks = Two(1, [str(refusal), 2])
    with pytest.raises(RefusedByMain) as silent, agreed(ranks):
        pass
    assert silent.value.exit_code == 2
    ranks = Two(1, None)
    with agreed(ranks):
        pass

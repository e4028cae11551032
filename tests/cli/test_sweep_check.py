"""Every job of a sweep is compiled before the first one runs, with no more work than their differences require."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.cli import main

SMALL = ("task=evaluate", "compute.device=cpu", "compute.threads=1", "train.limit_batches=1")
SCALE = "+hooks.h={select: fc, hook: forward, action: scale, factor: 1.5}"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("hooks.clip_fc.max=glob(*)", "glob() picks names of a config group, and this is a key"),
        ("train.epochs=range(5,1)", "the range is empty"),
        ("model=glob(rasnet*)", "it matches none of the config group 'model'"),
    ],
)
def test_a_sweep_without_jobs_is_refused_with_the_reason(override: str, why: str, cwd: Path, capsys) -> None:
    assert main(["-m", "experiment=clip_fc", override]) == 2
    said = capsys.readouterr().err
    assert f"{override.replace('=', ': ', 1)} stands for no value: {why}" in said
    assert list(cwd.iterdir()) == []


def test_problems_of_all_jobs_are_reported_with_their_overrides_and_leave_no_files(cwd: Path, capsys) -> None:
    command = ["-m", *SMALL, SCALE, "hooks.h.factor=0.5,1.5,x", "hooks.h.select=fc,fcc"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("2 configuration errors\n  job #1 (")
    assert (
        "hooks.h.select: 'fcc' matches no module of CNN; the same in #3 (hooks.h.factor=1.5 hooks.h.select=fcc)"
        in said
    )
    assert "hooks.h.factor: found 'x'" in said
    assert list(cwd.iterdir()) == []


def test_the_metric_of_an_objective_is_checked_before_the_first_job(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "train.epochs=1,2", "objective=val/acuracy"]) == 2
    said = capsys.readouterr().err
    assert "objective.metric: found 'val/acuracy'" in said and "did you mean 'val/accuracy'" in said
    assert (notes.ran, list(cwd.iterdir())) == ([], [])
    assert main(["-m", *SMALL, "seed=5", "objective=train/loss"]) == 0, "it may be of another task"

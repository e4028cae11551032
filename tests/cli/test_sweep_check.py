"""Every job of a sweep is compiled before the first one runs, with no more work than their differences need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookrun.cli import main
from hookrun.errors import SpecError
from hookrun.spec import Experiment
from hookrun.tasks import check_jobs, parse_experiment, prepare

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
def test_a_sweep_of_no_job_says_why(override: str, why: str, cwd: Path, capsys) -> None:
    assert main(["-m", "experiment=clip_fc", override]) == 2
    said = capsys.readouterr().err
    assert f"{override.replace('=', ': ', 1)} stands for no value: {why}" in said
    assert list(cwd.iterdir()) == []


def test_the_misfits_of_all_jobs_are_told_with_their_overrides_and_leave_nothing(cwd: Path, capsys) -> None:
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


def jobs(**changes: list[Any]) -> dict[int, Experiment]:
    """The jobs of a sweep over keys of one hook."""
    (key, values), plain = next(iter(changes.items())), dict(BIAS)
    made = [{**PLAIN, "hooks": {"h": {**plain, key: value}}} for value in values]
    return {number: parse_experiment(each) for number, each in enumerate(made)}


PLAIN = {"task": {"name": "evaluate"}, "model": {"name": "mlp"}, "data": {"name": "digits"}}
BIAS = {"select": "fc", "hook": "forward", "action": "add_bias", "value": 1.5}


def test_shapes_are_checked_once_for_hooks_that_differ_in_fractions() -> None:
    found = check_jobs(jobs(value=[n / 7 for n in range(100)]), 60)
    assert (found.proven, found.unproven, dict(found.refused)) == (1, 0, {})
    found = check_jobs(jobs(value=[0.5, [0.5] * 10, [0.25] * 10, [0.5] * 3, [0.25] * 3]), 60)
    assert found.proven == 3 and list(found.refused) == [3, 4]
    assert "the value has shape [3]" in str(found.refused[4])
    found = check_jobs(jobs(index=["..., 3", "..., 9", "..., 30"]), 60)
    assert found.proven == 3 and list(found.refused) == [2]
    found = check_jobs(jobs(when=[{"step": [0]}, {"step": [1]}]) | {7: parse_experiment(PLAIN)}, 60)
    assert found.proven == 3 and not found.refused


def test_jobs_of_several_models_are_each_checked_against_their_own() -> None:
    made = [{**PLAIN, "model": {"name": name}, "hooks": {"h": {**BIAS, "select": select}}}
            for select in ("fc", "conv1") for name in ("mlp", "cnn")]  # fmt: skip
    found = check_jobs({number: parse_experiment(each) for number, each in enumerate(made)}, 60)
    assert list(found.refused) == [2] and "matches no module of MLP" in str(found.refused[2])
    wrong = {**PLAIN, "model": {"name": "mlp", "args": {"width": 3}}}
    found = check_jobs(
        {1: parse_experiment(wrong), 2: parse_experiment(wrong), 5: parse_experiment(PLAIN)}, 60
    )
    assert sorted(found.refused) == [1, 2] and isinstance(found.refused[2], SpecError)
    with pytest.raises(SpecError) as alone:
        prepare(parse_experiment(wrong))
    assert str(alone.value) == str(found.refused[2])


def test_when_time_is_up_names_are_checked_all_the_same() -> None:
    found = check_jobs(jobs(select=["fc", "fcc"]) | {5: parse_experiment(PLAIN)}, 0)
    assert (found.proven, found.unproven, list(found.refused)) == (0, 3, [1])


def test_the_metric_of_an_objective_is_checked_before_the_first_job(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "train.epochs=1,2", "objective=val/acuracy"]) == 2
    said = capsys.readouterr().err
    assert "objective.metric: found 'val/acuracy'" in said and "did you mean 'val/accuracy'" in said
    assert (notes.ran, list(cwd.iterdir())) == ([], [])
    assert main(["-m", *SMALL, "seed=5", "objective=train/loss"]) == 0, "it may be of another task"

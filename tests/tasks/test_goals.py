"""The metric by which runs are compared, or the reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.errors import SpecError
from hookrun.spec import Experiment
from hookrun.spec.objective import Goal
from hookrun.tasks import parse_experiment
from hookrun.tasks.base import check_objective, goal_of, required_goal


def experiment(objective: Any = None, **task: Any) -> Experiment:
    plain = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
    return parse_experiment({**plain, "task": {"name": "train"} | task, "objective": objective})


def why(objective: Any = None, **task: Any) -> str:
    with pytest.raises(SpecError) as error:
        required_goal(experiment(objective, **task))
    return str(error.value)


def test_the_goal_is_the_validation_accuracy_or_the_given_objective() -> None:
    assert goal_of(experiment()) == required_goal(experiment()) == Goal("val/accuracy", "maximize", "best")
    asked = {"metric": "train/loss", "direction": "maximize", "of": "last"}
    assert goal_of(experiment(asked)) == Goal("train/loss", "maximize", "last")


def test_without_a_goal_there_is_a_reason() -> None:
    assert "objective.metric: task=predict logs neither accuracy nor loss" in why(name="predict")
    misspelt = why("val/acuracy")
    assert "found 'val/acuracy', which this run does not log" in misspelt
    assert "did you mean 'val/accuracy'" in misspelt and "task=train logs" in misspelt
    generate = why("val/kl_first", name="generate", without_hooks=True)
    assert "objective.direction: is not known for 'val/kl_first'" in generate
    assert "objective.metric: is not given" in why(name="generate", without_hooks=True)


def test_a_metric_of_another_task_is_accepted_and_a_misspelt_one_is_not() -> None:
    check_objective(experiment("probe/accuracy"), ["probe"])
    check_objective(experiment("val/mine", name="predict"), [])  # logs nothing to compare
    for others, metric in (([], "probe/accuracy"), (["val"], "val/acuracy")):
        with pytest.raises(SpecError, match="which this run does not log"):
            check_objective(experiment(metric), others)

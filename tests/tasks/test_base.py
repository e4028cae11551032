"""What every task has: its own keys, the settings that differ from their defaults, and its kind."""

from __future__ import annotations

import pytest

from hookrun.errors import HookrunError
from hookrun.spec import Experiment
from hookrun.tasks import parse_experiment, show, task_of
from hookrun.tasks.base import Ready, changed, metric_tokens_of, metrics_of


def experiment(train: dict[str, object] | None = None, **task: object) -> Experiment:
    plain = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "task": task}
    return parse_experiment(plain if train is None else {**plain, "train": train})


def test_a_task_of_one_kind_refuses_the_other() -> None:
    probe, modules = (Ready(experiment(name=name)) for name in ("probe", "modules"))
    with pytest.raises(HookrunError, match="task=probe is run, not shown"):
        show(probe)
    with pytest.raises(HookrunError, match="task=modules is shown, not run"):
        modules.task.execute(modules, None)


def test_changed_keys_are_those_that_differ_from_their_defaults() -> None:
    train = experiment({"epochs": 7, "log_every": 3}, name="train").settings.train
    assert changed("train", train) == ["train.epochs", "train.log_every"]
    assert changed("train", train, but={"epochs"}) == ["train.log_every"]
    assert changed("train", experiment(name="train").settings.train) == []


def test_a_task_without_the_keys_has_no_metrics_and_no_tokens() -> None:
    evaluate = task_of(experiment(name="evaluate", metrics=["loss"], tokens=-1))
    assert [each.name for each in metrics_of(evaluate) or ()] == ["loss"]
    assert metric_tokens_of(evaluate) is not None
    for name in ("modules", "probe"):
        task = task_of(experiment(name=name))
        assert metrics_of(task) is None and metric_tokens_of(task) is None, name

"""What tasks have in common: their own keys, splits and metrics, the samples they can reach, hooks that never fire."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.errors import HookrunError, SpecError
from hookrun.spec import Experiment
from hookrun.tasks import parse_experiment, show, task_of
from hookrun.tasks.base import Ready, changed, metric_tokens_of, metrics_of
from hookrun.tasks.under_hooks import TaskUnderHooks, samples_of_a_pass


def experiment(task: dict[str, Any], **sections: Any) -> Experiment:
    plain = {"model": {"name": "mlp"}, "data": {"name": "digits", "batch_size": 10}}
    return parse_experiment({**plain, "compute": {"device": "cpu"}, **sections, "task": task})


def reach(task: dict[str, Any], **train: Any) -> tuple[int | None, int | None]:
    made = experiment(task, train=train)
    of = task_of(made)
    assert isinstance(of, TaskUnderHooks)
    sizes = {"train": 95, "val": 45}
    return of.samples_in_reach(made.settings, sizes), of.samples_in_all(made.settings, sizes)


def test_the_samples_that_hooks_can_see() -> None:
    assert reach({"name": "predict"}) == (45, 45)
    assert reach({"name": "predict", "split": "train"}, limit_batches=3) == (30, 30)
    assert reach({"name": "predict", "split": "all"}, limit_batches=5) == (None, 50 + 45)
    assert samples_of_a_pass(experiment({"name": "train"}).settings, None) is None


def test_an_unknown_logger_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"did you mean 'mlflow'\?"):
        experiment({"name": "predict", "loggers": ["mlfow"]})


def test_the_metrics_that_can_be_optimized_are_those_of_its_split() -> None:
    def measures(**task: object) -> dict[str, str | None]:
        made = experiment({"name": "evaluate", **task})
        return dict(task_of(made).measures(made.settings))

    assert measures() == {"val/loss": "minimize", "val/accuracy": "maximize"}
    found = measures(split="train", metrics=["perplexity"])
    assert found == {"train/loss": "minimize", "train/perplexity": "minimize"}


def test_a_task_of_one_kind_refuses_the_other() -> None:
    probe, modules = (Ready(experiment({"name": name})) for name in ("probe", "modules"))
    with pytest.raises(HookrunError, match="task=probe is run, not shown"):
        show(probe)
    with pytest.raises(HookrunError, match="task=modules is shown, not run"):
        modules.task.execute(modules, None)


def test_changed_keys_are_those_that_differ_from_their_defaults() -> None:
    train = experiment({"name": "train"}, train={"epochs": 7, "log_every": 3}).settings.train
    assert changed("train", train) == ["train.epochs", "train.log_every"]
    assert changed("train", train, but={"epochs"}) == ["train.log_every"]
    assert changed("train", experiment({"name": "train"}).settings.train) == []


def test_a_task_without_the_keys_has_no_metrics_and_no_tokens() -> None:
    evaluate = task_of(experiment({"name": "evaluate", "metrics": ["loss"], "tokens": -1}))
    assert [each.name for each in metrics_of(evaluate) or ()] == ["loss"]
    assert metric_tokens_of(evaluate) is not None
    for name in ("modules", "probe"):
        task = task_of(experiment({"name": name}))
        assert metrics_of(task) is None and metric_tokens_of(task) is None, name

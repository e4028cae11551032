"""Mistakes in `task.metrics` and `task.tokens` that are found without running anything."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.data import DataInfo, describe
from hookrun.tasks import parse_experiment, task_of
from hookrun.tasks.metrics.problems import metric_problems


def said(data: str, metrics: list[Any], loss: str = "cross_entropy", **task: Any) -> list[str]:
    experiment = parse_experiment(
        {
            "model": {"name": "cnn"},
            "data": {"name": data},
            "train": {"loss": loss},
            "task": {"name": "evaluate", "metrics": metrics, **task},
        }
    )
    info: DataInfo = describe(experiment.settings.data, "val")
    return [str(each) for each in metric_problems(task_of(experiment), experiment.settings, info)]


def by(name: str, way: str) -> dict[str, str]:
    return {"name": name, "by": way}


CE = "cross_entropy"


@pytest.mark.parametrize("data, metrics, loss, task, where", [
    ("digits", [by("accuracy", "position")], CE, {}, "task.metrics.0.by: the samples of"),
    ("digits", ["loss", "logit_difference"], CE, {}, "task.metrics.1: 'logit_difference' needs"),
    ("digits", ["loss"], CE, {"tokens": -1}, "task.tokens: the samples of the data 'digits'"),
    ("digits", [by("loss", "sample")], "output", {}, "task.metrics.0.by: with train.loss=output"),
    ("repeated_tokens", [by("mean_squared_error", "position")], CE, {}, "for a whole batch"),
    ("repeated_tokens", [by("loss", "position")], "mse", {}, "train.loss=mse is not computed token by token"),
    ("repeated_tokens", ["loss"], CE, {"tokens": {"phase": "generation"}}, "phase"),
    ("names", ["loss"], CE, {"tokens": {"span": "subjekt"}}, "subjekt"),
])  # fmt: skip
def test_each_mistake_is_reported_at_its_key(
    data: str, metrics: list[Any], loss: str, task: dict[str, Any], where: str
) -> None:
    found = said(data, metrics, loss, **task)
    assert len(found) == 1 and where in found[0], found


def test_valid_settings_have_no_problems() -> None:
    assert not said("digits", ["loss", by("accuracy", "sample"), "perplexity"])
    assert not said("repeated_tokens", [by("loss", "position"), by("rank", "sample")], tokens=-2)
    assert not said("names", ["logit_difference", "kl"])

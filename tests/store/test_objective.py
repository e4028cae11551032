"""Metrics and the objective of a sweep, which have short forms."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.errors import SpecError
from hookrun.run.tasks import parse_experiment
from hookrun.store.objective import (
    MOST_METRICS,
    Goal,
    MetricKeys,
    Metrics,
    Objective,
    asked,
    direction_of,
    preferred,
)

METRICS = TypeAdapter[tuple[MetricKeys, ...] | None](Metrics)


def test_each_goal_is_serialized_in_its_shortest_form() -> None:
    assert METRICS.validate_python("loss") == (MetricKeys(name="loss"),)
    assert METRICS.validate_python({"name": "loss"}) == (MetricKeys(name="loss"),)
    assert METRICS.validate_python(None) is None
    raw = ["loss", {"name": "kl", "by": "sample", "against": {"run": "base"}}]
    metrics = METRICS.validate_python(raw)
    assert METRICS.dump_python(metrics) == tuple(raw)
    assert asked(metrics, "kl")
    assert not asked(metrics, "accuracy")
    assert not asked(None, "loss")


@pytest.mark.parametrize(
    "raw", [[], "", {}, 3, [{"name": "kl", "by": "row"}], [{"nam": "kl"}], ["a"] * (MOST_METRICS + 1)]
)
def test_other_values_are_no_metrics(raw: Any) -> None:
    with pytest.raises(ValidationError):
        METRICS.validate_python(raw)


PLAIN = {"task": {"name": "train"}, "model": {"name": "cnn"}, "data": {"name": "digits"}}


def objective(raw: object) -> Objective:
    return parse_experiment({**PLAIN, "objective": raw}).settings.objective


def test_the_metric_alone_is_the_short_form() -> None:
    assert objective("val/loss") == objective({"metric": "val/loss"}) == Objective(metric="val/loss")
    assert objective(None) == objective({}) == parse_experiment(PLAIN).settings.objective
    assert objective({"metric": "val/loss", "direction": "maximize", "of": "last"}).of == "last"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (["val/loss", "val/accuracy"], "a sweep has one objective"),
        ({"metric": ["val/loss"]}, "a sweep has one objective"),
        ({"direction": ["minimize"]}, "a sweep has one objective"),
        ({"direction": "up"}, r"objective.direction: found 'up': expected 'maximize'"),
        ({"metrics": "val/loss"}, r"objective.metrics: unknown key"),
    ],
)
def test_several_objectives_are_refused(raw: object, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        objective(raw)


def test_accuracy_comes_before_loss_by_default() -> None:
    directions = {
        "val/accuracy": "maximize",
        "probe/accuracy": "maximize",
        "loss": "minimize",
        "val/mine": None,
    }
    assert {name: direction_of(name) for name in directions} == directions
    names = ["train/loss", "val/loss", "train/accuracy", "val/samples", "val/accuracy"]
    order = []
    while (best := preferred(names)) is not None:
        order.append(best)
        names.remove(best)
    assert order == ["val/accuracy", "train/accuracy", "val/loss", "train/loss"]


def test_a_goal_says_what_is_wanted() -> None:
    assert str(Goal("val/loss", "minimize", "last")) == "minimize val/loss (last epoch of a run)"

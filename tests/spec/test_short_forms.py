"""Values that have a short form: metrics, the objective of a sweep, and a choice of parameters."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.errors import SpecError
from hookrun.spec.objective import (
    MOST_METRICS,
    Goal,
    MetricKeys,
    Metrics,
    Objective,
    asked,
    direction_of,
    preferred,
)
from hookrun.spec.parameters import AddedBy, parse_choice
from hookrun.tasks import parse_experiment

METRICS = TypeAdapter[tuple[MetricKeys, ...] | None](Metrics)


def test_one_metric_is_a_list_of_one_and_none_is_the_default() -> None:
    assert METRICS.validate_python("loss") == (MetricKeys(name="loss"),)
    assert METRICS.validate_python({"name": "loss"}) == (MetricKeys(name="loss"),)
    assert METRICS.validate_python(None) is None


def test_metrics_are_serialized_in_their_shortest_form() -> None:
    raw = ["loss", {"name": "kl", "by": "sample", "against": {"run": "base"}}]
    assert METRICS.dump_python(METRICS.validate_python(raw)) == tuple(raw)


def test_whether_a_metric_is_listed() -> None:
    metrics = METRICS.validate_python(["loss", {"name": "kl"}])
    assert asked(metrics, "kl") and not asked(metrics, "accuracy") and not asked(None, "loss")


@pytest.mark.parametrize(
    "raw", [[], "", {}, 3, [{"name": "kl", "by": "row"}], [{"nam": "kl"}], ["a"] * (MOST_METRICS + 1)]
)
def test_other_values_are_no_metrics(raw: Any) -> None:
    with pytest.raises(ValidationError):
        METRICS.validate_python(raw)


PLAIN = {"task": {"name": "train"}, "model": {"name": "cnn"}, "data": {"name": "digits"}}


def objective(raw: object) -> Objective:
    return parse_experiment({**PLAIN, "objective": raw}).settings.objective


def test_the_metric_alone_is_the_short_form_and_nothing_is_the_default() -> None:
    assert objective("val/loss") == objective({"metric": "val/loss"}) == Objective(metric="val/loss")
    assert objective(None) == objective({}) == parse_experiment(PLAIN).settings.objective
    assert objective({"metric": "val/loss", "direction": "maximize", "of": "last"}).of == "last"


@pytest.mark.parametrize(
    "raw", [["val/loss", "val/accuracy"], {"metric": ["val/loss"]}, {"direction": ["minimize"]}]
)
def test_several_objectives_are_refused(raw: object) -> None:
    with pytest.raises(SpecError, match="a sweep has one objective"):
        objective(raw)


def test_a_direction_and_a_key_are_checked() -> None:
    with pytest.raises(SpecError, match=r"objective.direction: found 'up': expected 'maximize'"):
        objective({"direction": "up"})
    with pytest.raises(SpecError, match=r"objective.metrics"):
        objective({"metrics": "val/loss"})


def test_each_metric_has_its_natural_direction() -> None:
    for name in ("val/accuracy", "probe/accuracy"):
        assert direction_of(name) == "maximize"
    assert direction_of("train/loss") == direction_of("loss") == "minimize"
    assert direction_of("val/mine") is None


def test_by_default_accuracy_comes_before_loss_and_val_before_train() -> None:
    names = ["train/loss", "val/loss", "train/accuracy", "val/samples", "val/accuracy"]
    order = []
    while (best := preferred(names)) is not None:
        order.append(best)
        names.remove(best)
    assert order == ["val/accuracy", "train/accuracy", "val/loss", "train/loss"]


def test_a_goal_compares_two_values() -> None:
    assert Goal("val/accuracy", "maximize").is_better(0.9, 0.8)
    assert Goal("val/loss", "minimize").is_better(0.8, 0.9)
    assert str(Goal("val/loss", "minimize", "last")) == "minimize val/loss (last epoch of a run)"


def test_a_selector_a_hook_or_a_list() -> None:
    assert parse_choice("hook:lora").members == (AddedBy("lora"),)
    assert parse_choice("hook:*").members[0] == AddedBy("*")
    assert AddedBy("*").every and not AddedBy("lora").every
    assert str(parse_choice(["fc.*", "hook:lora"])) == "[fc.*, hook:lora]"
    assert str(parse_choice("fc.*")) == "fc.*"


def test_members_of_a_list_have_their_number_in_the_key_path() -> None:
    for raw, places in ((["fc", "h"], ["x.0", "x.1"]), (["fc"], ["x.0"]), ("fc", ["x"])):
        assert [where for where, _ in parse_choice(raw).placed("x")] == places


def test_a_choice_parses_to_itself() -> None:
    choice = parse_choice(["fc", "hook:a"])
    assert parse_choice(choice) is choice


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "an empty list"),
        ("hook:", "expected hook:NAME"),
        (1.5, "quote it"),
        (["{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}"] * 4, "too large"),  # all members together
    ],
)
def test_empty_and_too_large_choices_are_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_choice(raw)

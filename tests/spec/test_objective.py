"""The root key `objective`: its short form, the natural directions, and the refusal of several objectives."""

from __future__ import annotations

import pytest

from hookrun.errors import SpecError
from hookrun.spec.objective import Goal, Objective, direction_of, preferred
from hookrun.tasks import parse_experiment

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
    with pytest.raises(
        SpecError, match=r"objective.direction: found 'up': expected 'maximize' or 'minimize'"
    ):
        objective({"direction": "up"})
    with pytest.raises(SpecError, match=r"objective.metrics"):
        objective({"metrics": "val/loss"})


def test_each_metric_has_its_natural_direction() -> None:
    found = {
        name: direction_of(name)
        for name in ("val/accuracy", "train/loss", "loss", "probe/accuracy", "val/mine")
    }
    assert found == {
        "val/accuracy": "maximize", "train/loss": "minimize", "loss": "minimize", "probe/accuracy": "maximize",
        "val/mine": None,
    }  # fmt: skip


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

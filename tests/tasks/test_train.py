"""task=train: which samples it meets, and which numbers it has at its end. How it trains: `loop/test_training.py`."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.errors import SpecError
from hookrun.tasks import parse_experiment, task_of
from hookrun.tasks.train import TrainTask

SIZES = {"train": 95, "val": 45}


def task(
    data: dict[str, Any] | None = None, metrics: list[str] | None = None, **train: Any
) -> tuple[TrainTask, Any]:
    plain = {"model": {"name": "mlp"}, "data": {"name": "digits", "batch_size": 10, **(data or {})}}
    experiment = parse_experiment({**plain, "task": {"name": "train", "metrics": metrics}, "train": train})
    found = task_of(experiment)
    assert isinstance(found, TrainTask) and found.splits[0] == "train"
    return found, experiment.settings


def reach(**train: Any) -> tuple[int | None, int | None]:
    of, settings = task(**train)
    return of.samples_in_reach(settings, SIZES), of.samples_in_all(settings, SIZES)


def test_shuffled_epochs_meet_all_samples_and_others_those_of_their_batches() -> None:
    assert reach(epochs=2, limit_batches=3) == (95, 2 * (30 + 30))
    assert reach(epochs=2, limit_batches=3, shuffle=False) == (30, 2 * (30 + 30))
    assert reach(epochs=3) == (95, 3 * (95 + 45))
    assert reach(epochs=3, steps=4) == (95, None), "it may end earlier"
    of, settings = task()
    assert of.samples_in_reach(settings, {"train": None, "val": 5}) is None
    assert of.samples_in_all(settings, {"train": None, "val": 5}) is None


def test_it_has_numbers_of_the_validation_if_there_is_one_and_of_the_epochs() -> None:
    of, settings = task()
    found = of.measures(settings)
    assert found["val/loss"] == found["train/loss"] == "minimize" and found["val/accuracy"] == "maximize"
    assert next(iter(found)).startswith("val/")
    of, settings = task(metrics=["rank"])
    assert of.measures(settings)["val/rank"] == "minimize" and "val/accuracy" not in of.measures(settings)


def test_a_backward_pass_of_its_own_is_refused_with_the_tasks_that_have_one() -> None:
    plain = {"model": {"name": "mlp"}, "data": {"name": "digits"}}
    with pytest.raises(SpecError, match="task=train has a backward pass of its own"):
        parse_experiment({**plain, "task": {"name": "train", "backward": {"score": "top"}}})

"""The runs that `model.weights` and `task.metrics` name."""

from __future__ import annotations

from typing import Any

from hookrun.spec.named_runs import runs_of
from hookrun.tasks import parse_experiment

ROOT: dict[str, Any] = {"data": {"name": "digits"}, "hooks": {}}


def named(**sections: Any) -> dict[str, str]:
    return dict(runs_of(parse_experiment(ROOT | sections).settings))


def test_each_run_has_the_key_path_that_names_it() -> None:
    metrics = ["loss", {"name": "kl", "against": {"run": "base"}}]
    model = {"name": "cnn", "weights": {"run": "trained"}}
    assert named(model=model, task={"name": "predict", "metrics": metrics}) == {
        "model.weights.run": "trained",
        "task.metrics.1.against.run": "base",
    }


def test_weights_by_path_and_metrics_by_name_are_not_runs() -> None:
    assert named(model={"name": "cnn", "weights": "w.pt"}, task={"name": "predict", "metrics": "loss"}) == {}
    assert named(model={"name": "cnn"}, task={"name": "modules"}) == {}

"""The plan names all code of the user's own that a run uses beside its hooks, under the keys that name it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hookrun.tasks import parse_experiment
from hookrun.tasks.base import metrics_of
from hookrun.tasks.loop.losses import load_loss
from hookrun.tasks.loop.metrics import load_metrics
from hookrun.tasks.loop.own_code import own_code

NAMES = ("model", "data", "loss", "right", "step", "halving")


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = [f"def {name}(output, target): pass" for name in NAMES]
    (tmp_path / "owncode.py").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOKRUN_TRUST", "owncode")
    yield
    sys.modules.pop("owncode", None)


def found(*, trains: bool = True, **sections: Any) -> dict[str, str]:
    usual: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits"}}
    settings = parse_experiment(usual | sections).settings
    loss, metrics = load_loss(settings.train.loss), load_metrics(metrics_of(settings.task))
    return {where: code.name for where, code in own_code(settings, loss, metrics, trains=trains).items()}


def test_everything_of_the_users_own_is_named_by_its_key_and_nothing_of_hookruns() -> None:
    assert found(task={"name": "train", "metrics": ["loss", "accuracy"]}) == {}
    own = found(
        model={"name": "python", "factory": "owncode:model"},
        data={"name": "python", "factory": "owncode:data"},
        task={"name": "train", "metrics": ["owncode:right", "accuracy"]},
        train={"loss": "owncode:loss"},
    )
    assert own == {
        "model.factory": "owncode:model",
        "data.factory": "owncode:data",
        "train.loss": "owncode:loss",
        "task.metrics.right": "owncode:right",
    }


def test_optimizer_and_schedule_count_where_they_are_used() -> None:
    train = {"optimizer": {"name": "owncode:step"}, "scheduler": {"name": "owncode:halving"}}
    assert found(train=train) == {
        "train.optimizer.name": "owncode:step",
        "train.scheduler.name": "owncode:halving",
    }
    assert found(train=train, trains=False) == {}
    assert found(train={"optimizer": {"name": "SGD"}, "scheduler": {"name": "StepLR", "step_size": 1}}) == {}

"""The keys of the analyses of captures: bounds, and the sections that they do not use."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.errors import SpecError
from hookrun.spec import Experiment
from hookrun.tasks import parse_experiment, task_of


def experiment(task: dict[str, Any], **sections: Any) -> Experiment:
    plain = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
    return parse_experiment(plain | sections | {"task": {"name": "probe"} | task})


def test_memory_and_features_are_whole_numbers_within_bounds() -> None:
    assert experiment({"max_bytes": 2**50, "project": 2**24})
    for key, most in (("max_bytes", 2**50), ("project", 2**24)):
        for value in (0, -1, 1.0, True, "1", most + 1):
            with pytest.raises(SpecError, match=f"task.{key}"):
                experiment({key: value})


def test_hooks_and_changed_settings_of_a_run_are_unused() -> None:
    hooks = {"h": {"select": "fc", "hook": "forward", "action": "capture"}}
    some = experiment({}, train={"epochs": 9}, compute={"compile": True}, hooks=hooks)
    assert task_of(some).unused(some) == ["train.epochs", "compute.compile", "hooks"]
    none = experiment({})
    assert task_of(none).unused(none) == []

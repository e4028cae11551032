"""What all loggers share: the run's name, the names of its values, and the user's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hookrun.tasks.loop.loggers.base import LoggedRun, RunLogger, flat, tag, unless_set


def test_a_job_of_a_sweep_is_named_with_its_sweep() -> None:
    names = [
        LoggedRun(Path(path), {}).name
        for path in ("outputs/2026-01-02_10-00", "multirun/night/12", "runs/7a")
    ]
    assert names == ["2026-01-02_10-00", "night-12", "7a"]


def test_only_means_of_training_epochs_are_kept_apart_from_single_batches() -> None:
    found = {
        (split, of): tag(split, "loss", of) for split in ("train", "val") for of in ("batch", "epoch", None)
    }
    assert found.pop(("train", "epoch")) == "train/loss/epoch"
    assert found == {(split, of): f"{split}/loss" for split, of in found}


def test_nested_settings_have_one_path_each_and_empty_ones_are_not_lost() -> None:
    config = {"model": {"name": "cnn", "args": {}}, "tags": ["a", {"b": 1}], 3: {"x": None}}
    assert list(flat(config)) == [
        ("model.name", "cnn"), ("model.args", {}), ("tags", ["a", {"b": 1}]), ("3.x", None)
    ]  # fmt: skip
    assert list(flat({})) == []


def test_the_environment_is_the_user_s_also_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TEST_ONE", "mine")
    monkeypatch.delenv("HOOKRUN_TEST_TWO", raising=False)
    with pytest.raises(ZeroDivisionError), unless_set(HOOKRUN_TEST_ONE="ours", HOOKRUN_TEST_TWO="ours"):
        assert (os.environ["HOOKRUN_TEST_ONE"], os.environ["HOOKRUN_TEST_TWO"]) == ("mine", "ours")
        raise ZeroDivisionError
    assert os.environ["HOOKRUN_TEST_ONE"] == "mine" and "HOOKRUN_TEST_TWO" not in os.environ


class Plain(RunLogger):
    """With no more than a logger must have."""

    logger_name = package = "plain"

    def __init__(self, run: LoggedRun) -> None: ...

    def metrics(self, split: str, values: Mapping[str, float], step: int, of: Any = None) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def test_a_logger_need_not_show_records_and_values_but_metrics() -> None:
    logger = Plain(LoggedRun(Path("run"), {}))
    assert logger.record({"hook": "h"}) is logger.value(None, 1) is None  # type: ignore[arg-type,func-returns-value]
    assert logger.reached == 0
    with pytest.raises(TypeError, match="abstract"):
        RunLogger(LoggedRun(Path("run"), {}))  # type: ignore[abstract]

"""Names and values for loggers; a logger that fails does not end the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hookrun.run.passes.context import RunContext
from hookrun.run.passes.loggers import LoggedRun, loggers, tag, unless_set
from hookrun.run.passes.loggers.tensorboard import TensorBoard
from hookrun.store.format import entries


def test_a_job_of_a_sweep_is_named_with_its_sweep() -> None:
    names = [
        LoggedRun(Path(path), {}).name
        for path in ("outputs/2026-01-02_10-00", "multirun/night/12", "runs/7a")
    ]
    assert names == ["2026-01-02_10-00", "night-12", "7a"]


def test_means_of_epochs_are_apart_from_single_batches() -> None:
    found = {
        (split, of): tag(split, "loss", of) for split in ("train", "val") for of in ("batch", "epoch", None)
    }
    assert found.pop(("train", "epoch")) == "train/loss/epoch"
    assert found == {(split, of): f"{split}/loss" for split, of in found}


def test_empty_nested_settings_are_not_lost() -> None:
    config = {"model": {"name": "cnn", "args": {}}, "tags": ["a", {"b": 1}], 3: {"x": None}}
    assert list(entries(config)) == [
        ("model.name", "cnn"), ("model.args", {}), ("tags", ["a", {"b": 1}]), ("3.x", None)
    ]  # fmt: skip


def test_the_environment_is_the_user_s_also_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TEST_ONE", "mine")
    monkeypatch.delenv("HOOKRUN_TEST_TWO", raising=False)
    with pytest.raises(ZeroDivisionError), unless_set(HOOKRUN_TEST_ONE="ours", HOOKRUN_TEST_TWO="ours"):
        assert os.environ["HOOKRUN_TEST_ONE"] == "mine"
        assert os.environ["HOOKRUN_TEST_TWO"] == "ours"
        raise ZeroDivisionError
    assert os.environ["HOOKRUN_TEST_ONE"] == "mine"
    assert "HOOKRUN_TEST_TWO" not in os.environ


def test_a_logger_that_fails_does_not_fail_the_run(performed, monkeypatch, capsys, tmp_path: Path) -> None:
    closed = list[bool]()

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server is gone")

    def perform(context: RunContext) -> None:
        for loss in (2.0, 1.0):
            context.log("train", {"loss": loss}, "batch")

    for method in ("metrics", "__init__", "close"):
        with monkeypatch.context() as patched:
            if method != "close":
                patched.setattr(TensorBoard, "close", lambda self, failed: closed.append(failed))
            patched.setattr(TensorBoard, method, fail)
            assert performed(perform, path=method, loggers=("tensorboard",)) is None
        lines = map(json.loads, (tmp_path / method / "metrics.jsonl").read_text().splitlines())
        assert [line["loss"] for line in lines] == [2.0, 1.0]
        said = capsys.readouterr().err
        assert said.count("WARNING: the logger tensorboard failed") == 1
        assert "the server is gone" in said
    assert closed == [True], "what was opened is closed"


def test_wrong_loggers_are_refused_before_the_run(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused("task.loggers=[tensorbord]")
    assert "task.loggers: found 'tensorbord'" in said
    assert "did you mean 'tensorboard'?" in said
    assert "task.loggers" in refused("task.loggers=wandb")
    assert "task.loggers" in refused("task.loggers=[{name: wandb, base_url: 'http://example.org'}]")
    assert "unknown key" in refused("+task.tracking_uri='http://example.org'")
    monkeypatch.setattr("hookrun.run.passes.loggers.find_spec", lambda name: None)
    for name in loggers():
        said = refused(f"task.loggers=[{name}]")
        assert f"task.loggers: {name} is not installed" in said
        assert f"pip install 'hookrun[{name}]'" in said

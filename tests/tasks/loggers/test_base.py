"""Names and values for loggers; a logger that fails does not end the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hookrun.store.verify import verify
from hookrun.tasks.loggers import loggers
from hookrun.tasks.loggers.base import LoggedRun, flat, tag, unless_set
from hookrun.tasks.loggers.tensorboard import TensorBoard


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


QUICK = ("train.epochs=1", "train.limit_batches=4", "train.log_every=2")


def lines(run: Any) -> list[tuple[str, int, float, str]]:
    return [(line["split"], line["step"], line["loss"], line["of"]) for line in run.metrics]


def test_a_logger_that_fails_does_not_fail_the_run(run, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    expected, closed = lines(run(*QUICK)), list[bool]()
    capsys.readouterr()

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server is gone")

    for method in ("metrics", "__init__", "close"):
        with monkeypatch.context() as patched:
            if method != "close":
                patched.setattr(TensorBoard, "close", lambda self, failed: closed.append(failed))
            patched.setattr(TensorBoard, method, fail)
            found = run(*QUICK, "task.loggers=[tensorboard]")
        assert lines(found) == expected and found.status["status"] == "done" and verify(found.path).bad == []
        said = capsys.readouterr().err
        assert said.count("WARNING: the logger tensorboard failed") == 1 and "the server is gone" in said
    assert closed == [True], "what was opened is closed"


def test_loggers_are_closed_when_a_run_fails(run, hook, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()
    monkeypatch.setattr(TensorBoard, "close", lambda self, failed: closed.append(failed))
    check = hook(select="fc", hook="forward", action="check", max=-9, policy="error")
    run(*QUICK, "task.loggers=[tensorboard]", check, code=3)
    run("task=predict", "train.limit_batches=1", "task.loggers=[tensorboard]")
    assert closed == [True, False]


def test_wrong_loggers_are_refused_before_the_run(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused("task.loggers=[tensorbord]")
    assert "task.loggers: found 'tensorbord'" in said and "did you mean 'tensorboard'?" in said
    assert "task.loggers" in refused("task.loggers=wandb")
    assert "task.loggers" in refused("task.loggers=[{name: wandb, base_url: 'http://example.org'}]")
    assert "unknown key" in refused("+task.tracking_uri='http://example.org'")
    monkeypatch.setattr("hookrun.tasks.loggers.find_spec", lambda name: None)
    for name in loggers():
        said = refused(f"task.loggers=[{name}]")
        assert f"task.loggers: {name} is not installed" in said and f"pip install 'hookrun[{name}]'" in said

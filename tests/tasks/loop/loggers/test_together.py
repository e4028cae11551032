"""task.loggers: metrics go to other libraries too, which can harm neither the run nor its directory."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.store.verify import verify
from hookrun.tasks.loop.loggers import loggers
from hookrun.tasks.loop.loggers.tensorboard import TensorBoard

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
    monkeypatch.setattr("hookrun.tasks.loop.loggers.find_spec", lambda name: None)
    for name in loggers():
        said = refused(f"task.loggers=[{name}]")
        assert f"task.loggers: {name} is not installed" in said and f"pip install 'hookrun[{name}]'" in said

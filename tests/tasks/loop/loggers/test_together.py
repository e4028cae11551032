"""task.loggers: metrics go to other libraries too, which can harm neither the run nor its directory."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hookrun.cli import main
from hookrun.store.reader import open_run
from hookrun.store.verify import verify
from hookrun.tasks.loop.loggers import loggers
from hookrun.tasks.loop.loggers.base import unless_set
from hookrun.tasks.loop.loggers.tensorboard import TensorBoard

QUICK = ("train.epochs=1", "train.limit_batches=4", "train.log_every=2")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own settings, and no server."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def lines(run: Any) -> list[tuple[str, int, float, str]]:
    return [(line["split"], line["step"], line["loss"], line["of"]) for line in run.metrics]


def test_tensorboard_gets_the_experiment_and_each_job_of_a_sweep_its_own(tmp_path: Path, capsys) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    overrides = ["compute.device=cpu", *QUICK, "task.loggers=[tensorboard]", "hydra.sweep.dir=sweep"]
    assert main(["-m", *overrides, "train.optimizer.lr=0.01,0.02"]) == 0
    for job, rate in enumerate((0.01, 0.02)):
        found = EventAccumulator(str(tmp_path / f"sweep/{job}/tensorboard"))
        found.Reload()
        run = open_run(tmp_path / f"sweep/{job}")
        losses = [
            (split, e.step, e.value) for split in ("train", "val") for e in found.Scalars(f"{split}/loss")
        ]
        means = [("train", e.step, e.value) for e in found.Scalars("train/loss/epoch")]
        assert [*losses, *means] == [
            (split, step, pytest.approx(loss))
            for of in ("batch", "val", "epoch")
            for split, step, loss, kind in lines(run)
            if of == ("val" if split == "val" else kind)
        ]
        (config,) = found.Tensors("config/text_summary")
        assert f"train.optimizer.lr: {rate}" in config.tensor_proto.string_val[0].decode()
        assert verify(run.path).bad == []


def test_a_logger_that_fails_costs_the_run_nothing(run, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
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


def test_the_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TEST_ONE", "mine")
    import os

    with unless_set(HOOKRUN_TEST_ONE="ours", HOOKRUN_TEST_TWO="ours"):
        assert (os.environ["HOOKRUN_TEST_ONE"], os.environ["HOOKRUN_TEST_TWO"]) == ("mine", "ours")
    assert os.environ["HOOKRUN_TEST_ONE"] == "mine" and "HOOKRUN_TEST_TWO" not in os.environ


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_into_the_run_directory(run) -> None:
    pytest.importorskip("wandb", reason="hookrun[wandb] is not installed")
    found = run(*QUICK, "task.loggers=[wandb]", "experiment=clip_fc")
    (record,) = found.path.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert all(word in content for word in (b"train/loss", b"val/accuracy", b"clip_fc", b"train/lr"))
    assert verify(found.path).bad == []


@pytest.mark.filterwarnings("ignore")
def test_mlflow_writes_into_the_run_directory_or_where_the_user_says(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="hookrun[mlflow] is not installed")
    found = run(*QUICK, "task.loggers=[mlflow]", "experiment=clip_fc")
    assert verify(found.path).bad == []
    with sqlite3.connect(found.path / "mlflow/mlflow.db") as base:
        metrics = base.execute("select key, step, value from metrics where key like '%/loss'").fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
        states = base.execute("select status from runs").fetchall()
    assert sorted(metrics) == sorted((f"{split}/loss", step, loss) for split, step, loss in lines(found))
    assert (
        params["model.name"] == "cnn"
        and params["hooks.clip_fc.action"] == "clamp"
        and states == [("FINISHED",)]
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'own.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert not (run(*QUICK, "task.loggers=[mlflow]").path / "mlflow").exists()
    with sqlite3.connect(tmp_path / "own.db") as base:
        assert ("mine",) in base.execute("select name from experiments").fetchall()

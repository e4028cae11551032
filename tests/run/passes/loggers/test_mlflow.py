"""MLflow: a database in the run directory, or the server and the experiment that the user has set."""

from __future__ import annotations

import sqlite3
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hookrun.run.passes.loggers import LoggedRun
from hookrun.run.passes.loggers.mlflow import MOST_PARAMS, MLflow
from hookrun.store.verify import verify

QUICK = ("train.epochs=1", "train.limit_batches=4", "train.log_every=2")


@pytest.mark.filterwarnings("ignore")
def test_mlflow_writes_where_the_user_says(executed, tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow", reason="hookrun[mlflow] is not installed")
    found = executed(*QUICK, "task.loggers=[mlflow]", "experiment=clip_fc")
    assert verify(found.path).bad == []
    with sqlite3.connect(found.path / "mlflow/mlflow.db") as base:
        metrics = base.execute("select key, step, value from metrics where key like '%/loss'").fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
        states = base.execute("select status from runs").fetchall()
    assert sorted(metrics) == sorted(
        (f"{line['split']}/loss", line["step"], line["loss"]) for line in found.metrics
    )
    assert params["model.name"] == "cnn"
    assert params["hooks.clip_fc.action"] == "clamp"
    assert states == [("FINISHED",)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'own.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert not (executed(*QUICK, "task.loggers=[mlflow]").path / "mlflow").exists()
    with sqlite3.connect(tmp_path / "own.db") as base:
        assert ("mine",) in base.execute("select name from experiments").fetchall()


class Library(SimpleNamespace):
    """Stands in for the package's client: notes what it is told."""

    def __init__(self) -> None:
        super().__init__(experiments={}, uri="", params=[], metrics=[], ended=[], runs=[])

    def MlflowClient(self, tracking_uri: str) -> Library:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = artifact_location
        return name

    def create_run(self, number: str, run_name: str) -> Any:
        self.runs.append((number, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, number: str, params: Any = (), metrics: Any = ()) -> None:
        self.params += [params] if params else []
        self.metrics += metrics

    def set_terminated(self, number: str, state: str) -> None:
        self.ended.append((number, state))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    entities = SimpleNamespace(
        Param=lambda *pair: pair, Metric=lambda key, value, now, step: (key, value, step)
    )
    monkeypatch.setitem(sys.modules, "mlflow", found)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return found


def test_a_continued_run_keeps_the_database(library, tmp_path) -> None:
    for _ in range(2):
        MLflow(LoggedRun(tmp_path, {}))
    assert library.uri == f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"
    assert library.experiments == {"hookrun": str(tmp_path / "mlflow" / "artifacts")}
    assert library.runs == [("hookrun", tmp_path.name)] * 2


def test_a_server_of_the_user_s_gets_all_the_directory_nothing(library, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    MLflow(LoggedRun(tmp_path, {}))
    assert library.uri == "http://localhost:5000"
    assert library.experiments == {"mine": None}
    assert list(tmp_path.iterdir()) == []


def test_metrics_fit_what_the_library_takes(library, tmp_path) -> None:
    config = {
        "hooks": {"a[0] & b": {"max": 1}},
        "long": "x" * 900,
        "k" * 300: None,
        **dict.fromkeys(map(str, range(120)), 0),
    }
    logger = MLflow(LoggedRun(tmp_path, config))
    assert [len(batch) for batch in library.params] == [MOST_PARAMS, 23]
    assert library.params[0][:3] == [("hooks.a_0_ _ b.max", "1"), ("long", "x" * 500), ("k" * 250, "None")]
    logger.metrics("train", {"loss": 1, "a,b": 0.5}, 4, "epoch")
    assert library.metrics == [("train/loss/epoch", 1.0, 4), ("train/a_b/epoch", 0.5, 4)]
    logger.close(failed=True)
    logger.close(failed=False)
    assert library.ended == [("r", "FAILED"), ("r", "FINISHED")]

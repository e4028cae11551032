"""The MLflow logger: into a database in the run directory, or to the server that the user has set."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hookrun.run.passes.loggers import LoggedRun, RunLogger, tag, unless_set
from hookrun.store.format import entries

if TYPE_CHECKING:
    from hookrun.store.records import Of

EXPERIMENT = "hookrun"
FOLDER = "mlflow"
MOST_PARAMS = 100
"""The largest number of parameters in one call of the client."""
MOST_VALUE = 500
"""The largest number of characters in a parameter's value."""


class MLflow(RunLogger):
    """Logs through MLflow's client: into ``mlflow/mlflow.db`` in the run directory unless MLFLOW_TRACKING_URI is set.

    ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db`` shows it. The experiment's name is
    MLFLOW_EXPERIMENT_NAME, or `hookrun` by default.
    """

    logger_name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def __init__(self, run: LoggedRun) -> None:
        with unless_set(MLFLOW_DISABLE_TELEMETRY="true"):  # mlflow reads the variable at import
            from mlflow import MlflowClient
            from mlflow.entities import Param

        folder = run.path / FOLDER
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder.mkdir(exist_ok=True)  # a run that is resumed has it already
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        there = self._client.get_experiment_by_name(name)
        place = None if uri else str(folder / "artifacts")
        number = (
            there.experiment_id if there else self._client.create_experiment(name, artifact_location=place)
        )
        self._id: str = self._client.create_run(number, run_name=run.name).info.run_id
        values = {_allowed(key): str(value)[:MOST_VALUE] for key, value in entries(run.config)}
        params = [Param(key, value) for key, value in values.items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])

    def metrics(self, split: str, values: Mapping[str, float], step: int, of: Of | None = None) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        line = [
            Metric(_allowed(tag(split, name, of)), float(value), now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=line)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _allowed(name: str) -> str:
    """The name with `_` in place of characters that MLflow does not allow, at most 250 characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]

"""The runs that an experiment names outside the values of its hooks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from hookrun.spec.experiment import RunWeights, Settings

WEIGHTS = "model.weights"


def runs_of(settings: Settings) -> Mapping[str, str]:
    """Key path -> name of each run that `model.weights` and `task.metrics` name."""
    found = dict[str, str]()
    if isinstance(settings.model.weights, RunWeights):
        found[f"{WEIGHTS}.run"] = settings.model.weights.run
    for place, metric in enumerate(getattr(settings.task, "metrics", None) or ()):
        if metric.against is not None:
            found[f"task.metrics.{place}.against.run"] = metric.against.run
    return found

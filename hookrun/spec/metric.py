"""`task.metrics`: which metrics a task computes, and whether by position or by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_serializer

from hookrun.config.validation import Section

By = Literal["position", "sample"]
MOST_METRICS = 100
_MOST_NAME = 1_000
_MOST_PATH = 4_096


class Against(Section):
    """The run with whose predictions a metric compares.

    run: the directory of a run of task=predict, one of `needs`, or `previous`
    """

    run: Annotated[str, Field(min_length=1, max_length=_MOST_PATH)]


class MetricKeys(Section):
    """One metric; the short form is its name alone.

    name:    one of hookrun's metrics, or a function of a trusted package
    by:      position or sample: also one line of metrics.jsonl for each, beside the mean over all
    against: for `kl`: what the predictions are compared with; None: the same model without hooks
    """

    name: Annotated[str, Field(min_length=1, max_length=_MOST_NAME)]
    by: By | None = None
    against: Against | None = None

    @model_serializer(mode="wrap")
    def _short(self, whole: Callable[[Any], dict[str, Any]]) -> Any:
        """Serialize to the name alone if no other key is given."""
        return self.name if self.by is None and self.against is None else whole(self)


def _named(raw: Any) -> Any:
    return {"name": raw} if isinstance(raw, str) else raw


def _listed(raw: Any) -> Any:
    """Turn a single metric into a list of one."""
    if isinstance(raw, str | Mapping | MetricKeys) and raw:
        return [raw]
    if raw is not None and (not isinstance(raw, list | tuple) or not raw):
        raise ValueError(f"found {raw!r}, expected a list of metrics, such as [loss, accuracy]")
    return raw


Entry = Annotated[MetricKeys, BeforeValidator(_named, json_schema_input_type=str | MetricKeys)]
Metrics = Annotated[
    Annotated[tuple[Entry, ...], Field(max_length=MOST_METRICS)] | None,
    BeforeValidator(_listed, json_schema_input_type=str | list[str | MetricKeys] | MetricKeys | None),
]
"""The metrics that a task computes; None: the task's default metrics."""


def asked(metrics: tuple[MetricKeys, ...] | None, name: str) -> bool:
    """Whether the metric is listed."""
    return any(each.name == name for each in metrics or ())

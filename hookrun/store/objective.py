"""`task.metrics`, the metrics that a task computes; `objective`, the one by which the best job of a sweep is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_serializer, model_validator

from hookrun.engine.validation import Section
from hookrun.engine.values.index import AnyTarget

Direction = Literal["maximize", "minimize"]
OfRun = Literal["best", "last"]


_NATURAL: dict[str, Direction] = {
    "accuracy": "maximize",
    "train_accuracy": "maximize",
    "cka": "maximize",
    "top5_accuracy": "maximize",
    "loss": "minimize",
    "mean_absolute_error": "minimize",
    "mean_squared_error": "minimize",
    "difference": "minimize",
    "perplexity": "minimize",
    "logit_difference": "maximize",
    "probability": "maximize",
    "rank": "minimize",
    "kl": "minimize",
    "auroc": "maximize",
    "average_precision": "maximize",
    "f1": "maximize",
    "balanced_accuracy": "maximize",
    "r2": "maximize",
    "spearman": "maximize",
}


DIAGNOSTIC = frozenset({"kl", "logit_difference"})
"""Metrics that say how much a hook changes: unless it is the objective, none of their values is a better result."""

AVERAGED = ("seed",)
"""The default of `objective.over`."""


class Objective(Section):
    """What a sweep optimizes; the short form `objective: val/loss` names the metric alone.

    metric:    ``split/name`` of metrics.jsonl; None: the first of `task.metrics`, without those the accuracy if there
               is one, else the loss; of the val split if there is one
    direction: None: maximize an accuracy, minimize a loss, and so on
    of:        best or last: the value of a run's best epoch, or of its last
    over:      the keys of a sweep whose values are repetitions of one setting; the best setting has the best mean over
               them
    """

    metric: str | None = Field(default=None, max_length=1_000)
    direction: Direction | None = None
    of: OfRun = "best"
    over: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda raw: (raw,) if isinstance(raw, str) else raw),
        Field(max_length=100),
    ] = AVERAGED

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        keys = raw if isinstance(raw, Mapping) else {"metric": raw}
        if any(isinstance(keys.get(key), list) for key in ("metric", "direction")):
            raise ValueError("found a list: a sweep has one objective; name one metric, such as val/accuracy")
        return keys

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core), {"type": ["string", "null"]}]}


@dataclass(frozen=True)
class Goal:
    """An objective whose metric and direction are known. `str()` is a text such as ``maximize val/accuracy``."""

    metric: str
    direction: Direction
    of: OfRun = "best"

    def __str__(self) -> str:
        return f"{self.direction} {self.metric} ({self.of} epoch of a run)"


def direction_of(metric: str) -> Direction | None:
    """The direction in which ``split/name`` or ``name`` is better; None for an unknown metric."""
    return _NATURAL.get(metric.rpartition("/")[2])


def is_loss(metric: str) -> bool:
    """Whether ``split/name`` or ``name`` is a loss, an error or a divergence: smaller values are better."""
    return direction_of(metric) == "minimize" or "loss" in metric.rpartition("/")[2]


def preferred(names: Iterable[str]) -> str | None:
    """The default metric of an objective: an accuracy before a loss, the val split before others."""
    known = [name for name in names if direction_of(name) is not None]
    order = list(_NATURAL)
    return min(
        known,
        key=lambda name: (order.index(name.rpartition("/")[2]), not name.startswith("val/")),
        default=None,
    )


# ---- the metrics of a task -----------------------------------------------------------------------------------------


By = Literal["position", "sample"]
Average = Literal["macro", "micro", "none"]
MOST_METRICS = 100
MostRows = Annotated[int, Field(strict=True, ge=1)]
MOST_ROWS = 1_000_000
"""The default of `task.max_rows`."""


class Against(Section):
    """The run with whose predictions a metric compares.

    run: the directory of a run of task=predict, one of `needs`, or `previous`
    """

    run: Annotated[str, Field(min_length=1, max_length=4_096)]


class MetricKeys(Section):
    """One metric; the short form is its name alone.

    name:      one of hookrun's metrics, or a function of a trusted package
    by:        position or sample: also one line of metrics.jsonl for each, beside the mean over all
    against:   for `kl`: what the predictions are compared with; None: the same model without hooks
    average:   for `f1`, `auroc`, `average_precision`: the mean over classes (macro, the default), over all rows of all
               classes together (micro), or one value for each class (none)
    threshold: for `f1`, `balanced_accuracy`, where there is one score for each target 0 or 1: scores above it are
               predicted to be 1; None: 0, as for logits
    of:        the tensor of the model's output that it reads; None: `train.output`
    """

    name: Annotated[str, Field(min_length=1, max_length=1_000)]
    by: By | None = None
    against: Against | None = None
    average: Average | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    of: AnyTarget | None = None

    @model_serializer(mode="wrap")
    def _short(self, whole: Callable[[Any], dict[str, Any]]) -> Any:
        """Serialize to the keys that are given, or to the name alone."""
        given = {key: value for key, value in whole(self).items() if value is not None}
        return self.name if len(given) == 1 else given


def _listed(raw: Any) -> Any:
    """Turn a single metric into a list of one."""
    if isinstance(raw, str | Mapping | MetricKeys) and raw:
        return [raw]
    if raw is not None and (not isinstance(raw, list | tuple) or not raw):
        raise ValueError(f"found {raw!r}, expected a list of metrics, such as [loss, accuracy]")
    return raw


Entry = Annotated[
    MetricKeys,
    BeforeValidator(
        lambda raw: {"name": raw} if isinstance(raw, str) else raw, json_schema_input_type=str | MetricKeys
    ),
]
Metrics = Annotated[
    Annotated[tuple[Entry, ...], Field(max_length=MOST_METRICS)] | None,
    BeforeValidator(_listed, json_schema_input_type=str | list[str | MetricKeys] | MetricKeys | None),
]
"""The metrics that a task computes; None: the task's default metrics."""


def asked(metrics: tuple[MetricKeys, ...] | None, name: str) -> bool:
    """Whether the metric is listed."""
    return any(each.name == name for each in metrics or ())

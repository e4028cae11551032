"""The root key `objective`: the metric by which the best job of a sweep is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator

from hookrun.config.validation import Section

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
}


class Objective(Section):
    """What a sweep optimizes; the short form `objective: val/loss` names the metric alone.

    metric:    ``split/name`` of metrics.jsonl; None: the accuracy if there is one, else the loss, of the val split if
               there is one
    direction: None: maximize an accuracy, minimize a loss, and so on
    of:        best or last: the value of a run's best epoch, or of its last
    """

    metric: str | None = Field(default=None, max_length=1_000)
    direction: Direction | None = None
    of: OfRun = "best"

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        if isinstance(raw, Objective):
            return raw
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

    def is_better(self, value: float, than: float) -> bool:
        """Whether `value` is a better result."""
        return value > than if self.direction == "maximize" else value < than

    def __str__(self) -> str:
        return f"{self.direction} {self.metric} ({self.of} epoch of a run)"


def direction_of(metric: str) -> Direction | None:
    """The direction in which ``split/name`` or ``name`` is better; None for an unknown metric."""
    return _NATURAL.get(metric.rpartition("/")[2])


def preferred(names: Iterable[str]) -> str | None:
    """The default metric of an objective: an accuracy before a loss, the val split before others."""
    known = [name for name in names if direction_of(name) is not None]
    order = list(_NATURAL)
    return min(
        known,
        key=lambda name: (order.index(name.rpartition("/")[2]), not name.startswith("val/")),
        default=None,
    )

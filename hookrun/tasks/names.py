"""Names of hookrun's own data sets, transforms, losses and metrics, checked without importing torch.

Names of torch and torchvision (optimizers, schedules, models) are known only after their import, with the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hookrun.data import names as data_names
from hookrun.data.transforms import NAMES as TRANSFORMS
from hookrun.errors import Problem, nearest
from hookrun.trust.load import LOSSES as OWN_LOSS
from hookrun.trust.load import METRICS as OWN_METRIC
from hookrun.trust.load import Kind, is_user_code, short_names

LOSSES = (
    "cross_entropy",
    "nll",
    "mse",
    "l1",
    "smooth_l1",
    "huber",
    "next_token",
    "bce",
    "output",
    "output_mean",
    "output_sum",
)
KL = "kl"
METRICS = (
    "loss",
    "accuracy",
    "top5_accuracy",
    "mean_absolute_error",
    "mean_squared_error",
    "perplexity",
    "probability",
    "rank",
    "logit_difference",
    KL,
)


def unknown_names(config: Mapping[str, Any]) -> Iterator[Problem]:
    """The problem of each name that is not in its registry; values of a wrong type are left to the other checks."""
    data, train, task = (_mapping(config.get(key)) for key in ("data", "train", "task"))
    name = data.get("name")
    if isinstance(name, str) and name not in data_names():
        yield Problem("data.name", f"unknown data set {name!r}", nearest(name, data_names()))
    for key in ("transforms", "train_transforms"):
        for name in _mapping(data.get(key)):
            if isinstance(name, str) and name not in TRANSFORMS:
                yield Problem(f"data.{key}.{name}", "unknown transform", nearest(name, TRANSFORMS))
    yield from _unknown(train.get("loss"), "train.loss", "a loss", LOSSES, OWN_LOSS)
    metrics = task.get("metrics")
    listed = metrics if isinstance(metrics, Sequence) and not isinstance(metrics, str) else [metrics]
    for place, metric in enumerate(listed):
        yield from _unknown(metric, f"task.metrics.{place}", "a metric", METRICS, OWN_METRIC)
        name, against = _mapping(metric).get("name"), _mapping(metric).get("against")
        if isinstance(name, str) and name != KL and against is not None:
            text = f"{name!r} does not compare with another run: `against` is a key of {KL!r}"
            yield Problem(f"task.metrics.{place}.against", text, "leave it out")


def _mapping(section: Any) -> Mapping[Any, Any]:
    return section if isinstance(section, Mapping) else {}


def _unknown(raw: Any, where: str, what: str, names: Collection[str], own: Kind) -> Iterator[Problem]:
    """The problem of a name, or of a mapping with a name, that is neither hookrun's nor of the form of a user's own."""
    name = raw.get("name") if isinstance(raw, Mapping) else raw
    if isinstance(name, str) and name not in names and not is_user_code(name, own):
        known = [*names, *short_names(own)]
        yield Problem(where, f"found {name!r}, which is not {what}", nearest(name, known))

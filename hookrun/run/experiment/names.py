"""Names of data sets, transforms, losses and metrics in a configuration, checked without importing torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hookrun.data import names as data_names
from hookrun.data.transforms import NAMES as TRANSFORMS
from hookrun.engine.keys import GIVEN
from hookrun.engine.trust.load import LOSSES as OWN_LOSS
from hookrun.engine.trust.load import METRICS as OWN_METRIC
from hookrun.engine.trust.load import Kind, is_user_code, short_names
from hookrun.errors import Problem, nearest

LOSSES = (
    "cross_entropy",
    "nll",
    "mse",
    "l1",
    "smooth_l1",
    "bce_with_logits",
    "huber",
    "next_token",
    "bce",
    "output",
    "output_mean",
    "output_sum",
)
ACTIVATION = "activation"
"""The loss that reads a module instead of the output."""
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
    "auroc",
    "average_precision",
    "f1",
    "balanced_accuracy",
    "r2",
    "spearman",
)


def unknown_names(config: Mapping[str, Any]) -> Iterator[Problem]:
    """The problem of each name that is not in its registry; values of a wrong type are left to the other checks."""
    yield from _unknown_data(_mapping(config.get("data")))
    loss = _mapping(config.get("train")).get("loss")
    yield from _unknown(loss, "train.loss", "a loss", (*LOSSES, ACTIVATION), OWN_LOSS)
    for where, metric in _metrics(_mapping(config.get("task"))):
        yield from _unknown(metric, where, "a metric", METRICS, OWN_METRIC)
        name = _mapping(metric).get("name")
        if isinstance(name, str) and name != KL and _mapping(metric).get("against") is not None:
            yield Problem(
                f"{where}.against",
                f"{name!r} does not compare with another run: `against` is a key of {KL!r}",
                "leave it out",
            )


def _unknown_data(section: Mapping[Any, Any]) -> Iterator[Problem]:
    name = section.get("name")
    if isinstance(name, str) and name not in (*data_names(), GIVEN):
        yield Problem("data.name", f"unknown data set {name!r}", nearest(name, data_names()))
    for key in ("transforms", "train_transforms"):
        for transform in _mapping(section.get(key)):
            if isinstance(transform, str) and transform not in TRANSFORMS:
                yield Problem(f"data.{key}.{transform}", "unknown transform", nearest(transform, TRANSFORMS))


def _metrics(task: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The key path and the value of each metric that a task names."""
    metrics = task.get("metrics")
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        metrics = [metrics]
    for place, metric in enumerate(metrics):
        yield f"task.metrics.{place}", metric
    yield "task.metric", task.get("metric")


def _mapping(section: Any) -> Mapping[Any, Any]:
    return section if isinstance(section, Mapping) else {}


def _unknown(raw: Any, where: str, what: str, names: Collection[str], own: Kind) -> Iterator[Problem]:
    """The problem of a name, or of a mapping with a name, that is neither hookrun's nor of the form of a user's own."""
    name = raw.get("name") if isinstance(raw, Mapping) else raw
    if isinstance(name, str) and name not in names and not is_user_code(name, own):
        yield Problem(
            where, f"found {name!r}, which is not {what}", nearest(name, [*names, *short_names(own)])
        )

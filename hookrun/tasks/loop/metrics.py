"""The metrics of `task.metrics`: hookrun's own by name, and functions of trusted packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookrun.callables import Code
from hookrun.data import DataInfo
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.spec.experiment import Train
from hookrun.spec.metric import By, MetricKeys
from hookrun.spec.objective import Direction, direction_of
from hookrun.tasks.loop import score_metrics
from hookrun.tasks.loop.losses import LABELS_NEEDED, correct, correct_among, differences
from hookrun.tasks.loop.own_losses import make_callable
from hookrun.tasks.loop.score_metrics import OfRows
from hookrun.trusted import METRICS as KIND
from hookrun.trusted import Trusted, is_own, load, short_names

WHERE = "task.metrics"
LOSS = "loss"
ROWS_NEEDED = "scores [batch, classes] and labels [batch], or a score for each token at each position"


@dataclass(frozen=True)
class Metric:
    """A metric, whose mean over all samples, or over all predicted tokens, is logged.

    name:       its name in metrics.jsonl
    direction:  whether to maximize or minimize it; None: not known
    of_batch:   (output, target) -> the sum over the samples of a batch, or None if the targets do not fit.
                The loss does not have this function, since it is computed anyway
    needs:      a description of the targets that it needs
    of_rows:    computes a value for each row of scores; see `hookrun.tasks.loop.scored`; None: not row by row
    targetless: it is also computed at rows that have no target
    shown:      mean -> the value that is logged
    code:       the code of a user's own function
    by:         it is also logged by position or by sample
    against:    for `kl`: the run with which it compares; None: the model without hooks
    """

    name: str
    direction: Direction | None
    of_batch: Callable[[Any, Tensor], Tensor | float | None] | None = None
    needs: str = "targets"
    of_rows: OfRows | None = None
    targetless: bool = False
    shown: Callable[[float], float] = float
    code: Code | None = None
    by: By | None = None
    against: str | None = None


def _ours(name: str, *more: Any, **others: Any) -> Metric:
    return Metric(name, direction_of(name), *more, **others)


def _exp(value: float) -> float:
    """exp(value), infinite where Python's own function raises OverflowError."""
    return math.exp(value) if not value > _LARGEST else math.inf


_LARGEST = 709.0

PERPLEXITY, PROBABILITY, RANK = "perplexity", "probability", "rank"
LOGIT_DIFFERENCE, KL = "logit_difference", "kl"

METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        _ours(LOSS),
        _ours("accuracy", correct, LABELS_NEEDED, score_metrics.is_right),
        _ours("top5_accuracy", correct_among(5), LABELS_NEEDED, score_metrics.is_among(5)),
        _ours("mean_absolute_error", differences(torch.abs)),
        _ours("mean_squared_error", differences(torch.square)),
        _ours(PERPLEXITY, None, ROWS_NEEDED, score_metrics.surprisal, shown=_exp),
        _ours(PROBABILITY, None, ROWS_NEEDED, score_metrics.probability),
        _ours(RANK, None, ROWS_NEEDED, score_metrics.rank),
        _ours(LOGIT_DIFFERENCE, None, ROWS_NEEDED, score_metrics.logit_difference, targetless=True),
        _ours(KL, None, ROWS_NEEDED, score_metrics.kl, targetless=True),
    )
}
"""Every metric of hookrun by its name."""

DEFAULT = (METRICS[LOSS], METRICS["accuracy"])
"""The metrics if `task.metrics` is not given; the accuracy is computed only if the targets are labels."""

COLUMNS = frozenset(
    {
        "split",
        "epoch",
        "step",
        "lr",
        "samples",
        "module",
        "kind",
        "of",
        "seconds",
        "ema",
        "skipped_steps",
        "position",
        "sample",
        "tokens",
    }
)
"""Other keys of lines in metrics.jsonl, which a metric cannot have as its name."""


def load_metrics(names: Sequence[str | MetricKeys] | None) -> tuple[Metric, ...]:
    """The metrics that `task.metrics` lists.

    Raises SpecError with all names that are unknown, given twice or not trusted.
    """
    if names is None:
        return DEFAULT
    found, problems = list[Metric](), list[Problem]()
    for place, keys in enumerate(names):
        entry, where = MetricKeys(name=keys) if isinstance(keys, str) else keys, f"{WHERE}.{place}"
        try:
            against = None if entry.against is None else entry.against.run
            metric = replace(_load(entry.name, where), by=entry.by, against=against)
        except SpecError as error:
            problems += error.errors
            continue
        problems += _repeated(metric, found, where)
        found.append(metric)
        if against is not None and metric.name != KL:
            what = f"{metric.name!r} does not compare with another run: `against` is a key of {KL!r}"
            problems.append(Problem(f"{where}.against", what, "leave it out"))
    if problems:
        raise SpecError(problems)
    return tuple(found)


def _repeated(metric: Metric, before: Sequence[Metric], where: str) -> Iterator[Problem]:
    """A problem if another metric has the same name; the same metric may be listed by position, sample and total."""
    for other in (each for each in before if each.name == metric.name):
        same_number = replace(other, by=metric.by, of_batch=metric.of_batch) == metric
        if not same_number or other.by == metric.by:
            what = f"two metrics have the name '{metric.name}', which is their key in metrics.jsonl"
            yield Problem(where, what, "leave one out, or give its function another name")
            return


def _load(name: str, where: str) -> Metric:
    if name in METRICS:
        return METRICS[name]
    if not is_own(name, KIND):
        known = [*METRICS, *short_names(KIND)]
        raise SpecError([Problem(where, f"found {name!r}, which is not a metric", nearest(name, known))])
    own = load(name, KIND, where)
    if own.name in COLUMNS or own.name in METRICS:
        what = (
            f"'{own.text}' would have the key '{own.name}' in metrics.jsonl, which has another meaning there"
        )
        raise SpecError([Problem(where, what, "give the function another name")])
    direction = getattr(own.target, "direction", None)
    if direction not in ("maximize", "minimize", None):
        what = f"'{own.text}' has the attribute direction={direction!r}"
        raise SpecError([Problem(where, what, "expected 'maximize' or 'minimize'")])
    call = make_callable(own, {}, where, called_with=2)
    return Metric(own.name, direction, _Own(own, call), code=own.code)


class _Own:
    """A user's own metric: checks its result, and adds its name to its errors."""

    def __init__(self, own: Trusted, call: Any) -> None:
        self._own = own
        self._call = call

    def __call__(self, output: Any, target: Tensor) -> Tensor | float:
        """The sum over the samples of the batch; the user's function returns the mean. Raises HookrunError."""
        size = size_of(target)
        try:
            with torch.no_grad():
                found = self._call(output, target)
        except HookrunError:
            raise
        except Exception as error:
            raise HookrunError(f"{WHERE}: {self._own.failure(error)}") from error
        if isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex():
            return precise(found.reshape(())) * size
        if isinstance(found, int | float):
            return float(found) * size
        shown = (
            f"a tensor of shape {list(found.shape)} {found.dtype}"
            if isinstance(found, Tensor)
            else repr(found)
        )
        raise HookrunError(
            f"{WHERE}: '{self._own.text}' returned {shown[:200]}, expected one number: the mean over the batch"
        )


def precise(value: Tensor) -> Tensor:
    """The value, detached, in float64; in float32 on mps, which has no float64."""
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)


def size_of(target: Tensor) -> int:
    """The number of samples of a batch; 1 for a target without dimensions."""
    return target.shape[0] if target.dim() else 1


def measured(
    names: Sequence[str | MetricKeys] | None,
    train: Train,
    info: DataInfo,
    splits: Iterable[str],
    *,
    with_loss: bool = True,
) -> dict[str, Direction | None]:
    """``split/name`` of each metric -> whether to maximize or minimize it.

    Without `task.metrics` the accuracy is included if the targets are labels and train.loss is not `output`: whether a
    model that computes its own loss also returns scores is not known before the run.

    names:     `task.metrics`
    with_loss: the loss is computed even if it is not listed

    Raises SpecError for metrics that cannot be loaded.
    """
    target, metrics = info.target, load_metrics(names)
    if names is None:
        has_accuracy = (
            target is not None and not target.dtype.is_floating_point and train.loss.name != "output"
        )
        metrics = metrics if has_accuracy else (METRICS[LOSS],)
    directions = {metric.name: metric.direction for metric in metrics}
    if with_loss:
        directions.setdefault(LOSS, METRICS[LOSS].direction)
    return {f"{split}/{name}": each for split in splits for name, each in directions.items()}

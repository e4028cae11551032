"""The metrics of `task.metrics`: functions of rows by name, and functions of trusted packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hookrun.data import DataInfo, Split
from hookrun.data.samples import IGNORED
from hookrun.engine.trust.callables import Code
from hookrun.engine.trust.load import METRICS as KIND
from hookrun.engine.trust.load import load
from hookrun.engine.validation import parameters, unknown_arguments
from hookrun.engine.values.index import Target
from hookrun.errors import HookrunError, Mistakes, refuse, spec_error
from hookrun.run.experiment.metrics.losses import OF_VALUES, UserFunction, loss_of
from hookrun.run.experiment.metrics.over_split import (
    NOT_DEFINED,
    SplitRows,
    are_classes,
    balanced_accuracy,
    class_scores,
    decided,
    one_class_scores,
    r2,
    ranked,
    spearman,
    value_scores,
)
from hookrun.run.experiment.metrics.rows import BatchRows, RowPart, are_values, precise_dtype
from hookrun.run.experiment.settings import Train
from hookrun.store.objective import By, Direction, MetricKeys, direction_of

WHERE = "task.metrics"
LOSS = "loss"
LABELS_NEEDED = "class scores [batch, classes, ...] and labels [batch, ...]"
VALUES_NEEDED = "as many numbers as targets, in the same order"
ROWS_NEEDED = "scores [batch, classes] and labels [batch], or a score for each token at each position"
CLASSES_NEEDED = (
    "class scores [batch, classes] and labels [batch] below classes, or one score for each target 0 or 1"
)

PerRow = Callable[[RowPart], Tensor | None]


@dataclass(frozen=True)
class Metric:
    """A metric: a mean over all samples, or over all predicted tokens; or a value of the whole split.

    name:      its name in metrics.jsonl
    per_row:   n rows -> a value for each [n]; None if the output and the targets do not fit. The loss does not have
               this function, since it is computed anyway. For a metric over the whole split: their scores
    over:      of a metric over the whole split: all rows -> its value, or one for each class; NaN: not defined
    fits:      whether the values of the targets fit, as far as `per_row` does not say it; None: any do
    by_class:  it has one value for each class, ``name_0``, ``name_1`` and so on
    needs:     a description of the output and the targets that it needs
    rows:      the rows that it is computed from: `tokens`: all samples, and the tokens that have a target; `labels`:
               only samples and tokens that have one; `all`: also tokens without a target
    of_batch:  a user's own function in place of `per_row`, (output, targets) of a batch -> a value for each row [n], or
               one for the batch, without dimensions
    shown:     mean -> the value that is logged
    direction: whether to maximize or minimize it; None: not known
    code:      the code of a user's own function
    by:        it is also logged by position or by sample
    against:   for `kl`: the run with which it compares; None: the model without hooks
    where:     its key path
    of:        the tensor of the model's output that it reads; None: `train.output`
    """

    name: str
    per_row: PerRow | None = None
    needs: str = "targets"
    rows: Literal["tokens", "labels", "all"] = "tokens"
    of_batch: Callable[[Any, Tensor], Tensor] | None = None
    shown: Callable[[float], float] = float
    direction: Direction | None = None
    code: Code | None = None
    by: By | None = None
    against: str | None = None
    of: Target | None = None
    over: Callable[[SplitRows], list[float]] | None = None
    fits: Callable[[BatchRows], bool] | None = None
    by_class: bool = False
    where: str = WHERE

    def misfit(self, rows: BatchRows) -> HookrunError:
        """The error that it cannot be computed from these rows."""
        text = f"the targets have shape {list(rows.targets.shape)}, {rows.targets.dtype}"
        if rows.scores is not None:
            text += f", the scores {list(rows.scores.shape)}"
        return HookrunError(f"{self.where}: {self.name!r} needs {self.needs}; {text}")

    def keys(self, classes: int) -> list[str]:
        """Its keys in metrics.jsonl."""
        if not self.by_class:
            return [self.name]
        return [f"{self.name}_{number}" for number in range(classes)]

    def of_split(self, rows: SplitRows) -> dict[str, float]:
        """Its values over the whole split by their keys; NaN if it is not defined."""
        assert self.over is not None
        if self.code is not None:
            return {self.name: self.over(rows)[0]}
        keys = self.keys(rows.classes)
        if not rows.is_finite:
            return dict.fromkeys(keys, NOT_DEFINED)
        return dict(zip(keys, self.over(rows), strict=True))

    def needs_target(self, *, of_tokens: bool) -> bool:
        """Whether it is computed from the rows alone that have a target."""
        return self.rows == "labels" or (of_tokens and self.rows == "tokens")


def row_values(metrics: Sequence[Metric], rows: BatchRows) -> dict[str, Tensor]:
    """Name -> [n], the value of the metric at each row; [] if a function of the user's own has one for the batch.

    Metrics that do not fit the rows are left out.
    """
    columns: dict[str, list[Tensor]] = {}
    for part in rows.parts():
        for metric in metrics:
            column = None if metric.per_row is None else metric.per_row(part)
            if column is not None:
                columns.setdefault(metric.name, []).append(column)
    for metric in metrics:
        if metric.of_batch is not None and len(rows):
            with torch.no_grad():
                columns[metric.name] = [metric.of_batch(*rows.whole())]
    values: dict[str, Tensor] = {}
    for metric in metrics:
        if metric.name in columns and (metric.fits is None or metric.fits(rows)):
            parts = columns[metric.name]
            values[metric.name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return values


# ---- functions of rows ---------------------------------------------------------------------------------------------


def is_right(part: RowPart) -> Tensor | None:
    """1 if the target has the largest score, else 0; of several labels (pixels), the fraction that is right."""
    if not part.fits_labels:
        return None
    return _right_share(part.scores.argmax(1) == part.targets, part.targets)


def is_among(most: int, part: RowPart) -> Tensor | None:
    """As `is_right`, for targets among the `most` largest scores."""
    if not part.fits_labels:
        return None
    largest = part.scores.topk(min(most, part.scores.shape[1]), dim=1).indices
    return _right_share((largest == part.targets.unsqueeze(1)).any(1), part.targets)


def _right_share(right: Tensor, targets: Tensor) -> Tensor:
    """[n]: the share of the labels of each row that are right, of those that are to be predicted."""
    if right.dim() == 1:
        return right
    predicted = (targets != IGNORED).flatten(1).sum(1)
    return right.flatten(1).sum(1) / predicted.clamp(min=1)


def difference(measure: Callable[[Tensor], Tensor], part: RowPart) -> Tensor | None:
    """The mean of measure(output - target) over the elements of a row."""
    if not are_values(part.scores, part.targets) or not part.scores.numel():
        return None
    error = part.scores - part.targets.reshape(part.scores.shape).to(part.scores.dtype)
    return measure(error).reshape(len(error), -1).mean(1)


def surprisal(part: RowPart) -> Tensor | None:
    """The negative logarithm of the target's probability, in nats; `perplexity` is exp of its mean."""
    if not part.of_labels:
        return None
    return -part.at(part.log_probabilities, part.targets)


def probability(part: RowPart) -> Tensor | None:
    """The target's probability: softmax over all classes or tokens."""
    if not part.of_labels:
        return None
    return part.at(part.log_probabilities, part.targets).exp()


def rank(part: RowPart) -> Tensor | None:
    """The target's rank by its score: 1 is the most probable; equal scores share the better rank; NaN gives NaN."""
    if not part.of_labels:
        return None
    place = 1 + (part.scores > part.at(part.scores, part.targets)[:, None]).sum(1)
    return place.to(part.scores.dtype).masked_fill(part.scores.isnan().any(1), torch.nan)


def logit_difference(part: RowPart) -> Tensor:
    """The score of the right answer minus that of the wrong answer."""
    assert part.answers is not None and part.wrong is not None  # `Measuring` requires them
    return part.at(part.scores, part.answers) - part.at(part.scores, part.wrong)


def kl(part: RowPart) -> Tensor | None:
    """KL(P || Q) in nats: P the probabilities to compare with, Q those of the model under its hooks."""
    if part.scores.dim() != 2:
        return None
    assert part.others is not None  # `Measuring` sets them
    theirs = F.log_softmax(part.others, dim=1)
    terms = theirs.exp() * (theirs - part.log_probabilities)
    # A class with probability 0 in P adds 0, whatever its probability in Q.
    terms = torch.where(theirs == -torch.inf, 0.0, terms)
    # Rounding may give a value below 0; NaN stays NaN.
    return terms.sum(1, dtype=precise_dtype(terms)).clamp(min=0)


# ---- the metrics by name -------------------------------------------------------------------------------------------


def _exp(value: float) -> float:
    """exp(value); infinite where Python's own function raises OverflowError."""
    return torch.tensor(value, dtype=torch.float64).exp().item()


PERPLEXITY, PROBABILITY, RANK = "perplexity", "probability", "rank"
LOGIT_DIFFERENCE, KL = "logit_difference", "kl"

OfClasses = partial(Metric, needs=CLASSES_NEEDED, rows="labels", fits=are_classes)
OfValues = partial(Metric, needs="one score for each target", rows="labels")

_METRICS = (
    Metric(LOSS),
    Metric("accuracy", is_right, LABELS_NEEDED),
    Metric("top5_accuracy", partial(is_among, 5), LABELS_NEEDED),
    Metric("mean_absolute_error", partial(difference, torch.abs), VALUES_NEEDED),
    Metric("mean_squared_error", partial(difference, torch.square), VALUES_NEEDED),
    Metric(PERPLEXITY, surprisal, ROWS_NEEDED, "labels", shown=_exp),
    Metric(PROBABILITY, probability, ROWS_NEEDED, "labels"),
    Metric(RANK, rank, ROWS_NEEDED, "labels"),
    Metric(LOGIT_DIFFERENCE, logit_difference, ROWS_NEEDED, "all"),
    Metric(KL, kl, ROWS_NEEDED, "all"),
    OfClasses("auroc", class_scores, over=partial(ranked, "roc_auc_score")),
    OfClasses("average_precision", class_scores, over=partial(ranked, "average_precision_score")),
    OfClasses("f1", class_scores, over=partial(decided, "f1_score")),
    OfClasses("balanced_accuracy", one_class_scores, over=balanced_accuracy),
    OfValues("r2", value_scores, over=r2),
    OfValues("spearman", value_scores, over=spearman),
)

METRICS: Mapping[str, Metric] = {
    metric.name: replace(metric, direction=direction_of(metric.name)) for metric in _METRICS
}
"""Every metric of hookrun by its name."""

OF_TOKENS = {name for name, metric in METRICS.items() if metric.over is None} - {
    "mean_absolute_error",
    "mean_squared_error",
}
"""The metrics that have a value for each token, and so for each position."""

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
        "note",
    }
)
"""Other keys of lines in metrics.jsonl, which a metric cannot have as its name."""


def load_metrics(names: Sequence[str | MetricKeys] | None) -> tuple[Metric, ...]:
    """The metrics that `task.metrics` lists.

    Raises SpecError with all names that are unknown, given twice or not trusted.
    """
    if names is None:
        return DEFAULT
    metrics: list[Metric] = []
    mistakes = Mistakes()
    for place, keys in enumerate(names):
        if isinstance(keys, str):
            keys = MetricKeys(name=keys)
        metric = mistakes.tried(_load, keys, f"{WHERE}.{place}")
        if metric is None:
            continue
        if any(_clash(metric, other) for other in metrics):
            mistakes.note(
                metric.where,
                f"two metrics have the name '{metric.name}', which is their key in metrics.jsonl",
                "leave one out; a function of your own may have another name",
            )
        metrics.append(metric)
    mistakes.refuse()
    return tuple(metrics)


def _clash(metric: Metric, other: Metric) -> bool:
    """Whether two metrics have the same key. One may be listed by position, by sample and for the total."""
    if other.keys(1) != metric.keys(1):
        return False
    is_same = (other.against, other.code, other.of) == (metric.against, metric.code, metric.of)
    return not is_same or other.by == metric.by


def _with_keys(metric: Metric, keys: MetricKeys, where: str) -> Metric:
    """The metric with the other keys of its entry. Raises SpecError for those that it does not take."""
    given: dict[str, Any] = {}
    if keys.average is not None:
        given["average"] = keys.average
    if keys.threshold is not None:
        given["threshold"] = keys.threshold
    over = metric.over
    allowed = set[str]() if over is None else (parameters(over) or {}).keys() - {"rows"}
    refuse(unknown_arguments(given, allowed, where, metric.name))
    if over is not None:
        over = partial(over, **given)
        if keys.by is not None:
            raise spec_error(
                f"{where}.by", f"{metric.name!r} is computed over the whole split", "leave it out"
            )
    against = None if keys.against is None else keys.against.run
    by_class = keys.average == "none"
    return replace(metric, by=keys.by, against=against, over=over, by_class=by_class, where=where, of=keys.of)


def _load(keys: MetricKeys, where: str) -> Metric:
    return _with_keys(METRICS.get(keys.name) or _user_metric(keys.name, where), keys, where)


def _user_metric(name: str, where: str) -> Metric:
    trusted = load(name, KIND, where)
    if trusted.name in COLUMNS or trusted.name in METRICS:
        raise spec_error(
            where,
            f"'{trusted.text}' would have the key '{trusted.name}' in metrics.jsonl, which has another meaning there",
            "give the function another name",
        )
    direction = getattr(trusted.target, "direction", None)
    if direction not in ("maximize", "minimize", None):
        raise spec_error(
            where,
            f"'{trusted.text}' has the attribute direction={direction!r}",
            "expected 'maximize' or 'minimize'",
        )
    function = UserFunction.of(trusted, {}, where)
    over = getattr(trusted.target, "over", None)
    if over is None:
        return Metric(trusted.name, of_batch=function.values, direction=direction, code=trusted.code)
    if over != "split":
        raise spec_error(where, f"'{trusted.text}' has the attribute over={over!r}", "expected 'split'")

    def of_split(rows: SplitRows) -> list[float]:
        return [float(function.values(rows.scores, rows.targets).mean())]

    return Metric(
        trusted.name,
        lambda part: part.scores,
        rows="labels",
        over=of_split,
        direction=direction,
        code=trusted.code,
    )


def measured(
    names: Sequence[str | MetricKeys] | None,
    train: Train,
    info: DataInfo,
    splits: Iterable[str],
    *,
    with_loss: bool = False,
    training: Split | None = None,
) -> dict[str, Direction | None]:
    """``split/name`` of each metric -> whether to maximize or minimize it.

    Without `task.metrics` the accuracy is included if the targets are labels, unless the loss compares numbers or the
    model computes it: whether it also returns scores is not known before the run.

    names:     `task.metrics`
    with_loss: the loss is computed even if it is not listed
    training:  the split that is trained on, for which metrics over a whole split are not computed

    Raises SpecError for metrics that cannot be loaded.
    """
    target = info.target
    metrics = list(load_metrics(names))
    if names is None:
        loss = loss_of(train, info)
        has_labels = target is not None and not target.dtype.is_floating_point
        if loss is None:
            metrics = []
        elif not has_labels or loss.name == "output" or loss.name in OF_VALUES:
            metrics = [METRICS[LOSS]]
    if with_loss:
        metrics.append(METRICS[LOSS])
    classes = info.num_classes
    if not classes:
        classes = 2 if target is None else max(math.prod(target.shape), 2)
    directions: dict[str, Direction | None] = {}
    for split in splits:
        for metric in metrics:
            if metric.over is None or split != training:
                directions.update((f"{split}/{key}", metric.direction) for key in metric.keys(classes))
    return directions

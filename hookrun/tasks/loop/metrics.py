"""Metrics over batches, weighted by their sizes, read from the device only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.callables import Code
from hookrun.data import DataInfo
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.spec.experiment import Train
from hookrun.spec.objective import Direction, direction_of
from hookrun.tasks.loop.losses import LABELS_NEEDED, correct, correct_among, differences, scored_tokens
from hookrun.tasks.loop.own_losses import made
from hookrun.trusted import METRICS as KIND
from hookrun.trusted import Trusted, is_own, load, short_names

WHERE = "task.metrics"
LOSS = "loss"


@dataclass(frozen=True)
class Metric:
    """A number for each batch, of which runs show the mean over all samples.

    direction: which way is better; None: the user's own function does not say
    of_batch:  output, target -> the sum over the samples of a batch; None: it cannot be computed for such targets.
               The loss, which is computed anyway, has none
    needs:     the targets that it can be computed for
    code:      of the user's own
    """

    name: str
    direction: Direction | None
    of_batch: Callable[[Any, Tensor], Tensor | float | None] | None = None
    needs: str = "targets"
    code: Code | None = None


def _ours(name: str, *more: Any) -> Metric:
    return Metric(name, direction_of(name), *more)


METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        _ours(LOSS),
        _ours("accuracy", correct, LABELS_NEEDED),
        _ours("top5_accuracy", correct_among(5), LABELS_NEEDED),
        _ours("mean_absolute_error", differences(torch.abs)),
        _ours("mean_squared_error", differences(torch.square)),
    )
}
"""Every metric of ours by name."""

DEFAULT = (METRICS[LOSS], METRICS["accuracy"])
"""What is computed where `task.metrics` is not given: the accuracy where the targets are labels."""

COLUMNS = frozenset(
    {"split", "epoch", "step", "lr", "samples", "module", "kind", "of", "seconds", "ema", "skipped_steps"}
)
"""What else a line of metrics.jsonl may hold; no metric has such a name."""


def load_metrics(names: Sequence[str] | None) -> tuple[Metric, ...]:
    """The metrics that `task.metrics` lists.

    Raises SpecError with every name that is unknown, given twice or not trusted.
    """
    if names is None:
        return DEFAULT
    found, problems = list[Metric](), list[Problem]()
    for place, name in enumerate(names):
        try:
            found.append(_load(name, f"{WHERE}.{place}"))
        except SpecError as error:
            problems += error.errors
    for place, metric in enumerate(found):
        if any(metric.name == other.name for other in found[:place]):
            what = f"two metrics have the name '{metric.name}', under which each stands in metrics.jsonl"
            problems.append(
                Problem(f"{WHERE}.{place}", what, "leave one out, or give its function another name")
            )
    if problems:
        raise SpecError(problems)
    return tuple(found)


def _load(name: str, where: str) -> Metric:
    if name in METRICS:
        return METRICS[name]
    if not is_own(name, KIND):
        known = [*METRICS, *short_names(KIND)]
        raise SpecError([Problem(where, f"found {name!r}, which is not a metric", nearest(name, known))])
    own = load(name, KIND, where)
    if own.name in COLUMNS or own.name in METRICS:
        what = f"'{own.text}' would stand in metrics.jsonl as '{own.name}', which means something else there"
        raise SpecError([Problem(where, what, "give the function another name")])
    direction = getattr(own.target, "direction", None)
    if direction not in ("maximize", "minimize", None):
        what = f"'{own.text}' has the attribute direction={direction!r}"
        raise SpecError([Problem(where, what, "expected 'maximize' or 'minimize'")])
    return Metric(own.name, direction, _Own(own, made(own, {}, where, called_with=2)), code=own.code)


class _Own:
    """A metric of the user's own: what it returns is checked, what it raises is told with its place."""

    def __init__(self, own: Trusted, call: Any) -> None:
        self._own = own
        self._call = call

    def __call__(self, output: Any, target: Tensor) -> Tensor | float:
        """What it returns is the mean over the batch."""
        size = size_of(target)
        try:
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
    """The value without its graph in float64, which mps does not have."""
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)


def size_of(target: Tensor) -> int:
    """The number of samples of a batch."""
    return target.shape[0] if target.dim() else 1


def measured(
    names: Sequence[str] | None,
    train: Train,
    info: DataInfo,
    splits: Iterable[str],
    *,
    with_loss: bool = True,
) -> dict[str, Direction | None]:
    """``split/name`` of the means over each split -> which are better.

    Without `task.metrics` there is an accuracy where the targets are labels and the loss compares the output with them;
    of a model that computes its own loss nobody knows beforehand whether its output holds scores too.

    names:     `task.metrics`
    with_loss: the loss is computed even where it is not listed

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


class Average:
    """The mean loss and metrics of the samples seen since the last reset.

    metrics: in the order in which they are shown
    """

    def __init__(self, metrics: Sequence[Metric] = DEFAULT) -> None:
        self.samples = 0
        self._metrics = metrics
        self._sums = dict[str, Tensor | float]()

    def add(self, loss: Tensor | None, output: Any, target: Tensor, *, tokens: bool = False) -> None:
        """One batch: its mean loss if there is one, the model's output and the targets.

        tokens: the targets are next tokens: each that is to be predicted counts as a sample
        """
        scored = scored_tokens(output, target) if tokens else (output, target)
        if scored is None and self._metrics is not DEFAULT and any(each.of_batch for each in self._metrics):
            raise HookrunError(f"{WHERE}: the model's output has no score for each token at each position")
        metrics = self._metrics if scored is not None else ()
        output, target = scored or (output, target)
        size = size_of(target)
        self.samples += size
        if loss is not None:
            self._add(LOSS, precise(loss) * size)
        if not size:
            return
        with torch.no_grad():
            for metric in metrics:
                if metric.of_batch is not None:
                    self._add(metric.name, _computed(metric, output, target, self._metrics))

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        return {"samples": self.samples, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.samples, self._sums = state["samples"], dict(state["sums"])

    def include(self, other: Average) -> None:
        """Everything that another one of the same metrics has seen."""
        self.samples += other.samples
        for name, total in other._sums.items():
            self._add(name, total)

    def _add(self, name: str, total: Tensor | float | None) -> None:
        if total is not None:
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def read(self) -> dict[str, float]:
        """`loss` and the metrics by name: `accuracy` as a fraction; nothing where no sample was seen."""
        if not self.samples:
            return {}
        names = dict.fromkeys([LOSS, *(metric.name for metric in self._metrics)])
        return {name: float(self._sums[name]) / self.samples for name in names if name in self._sums}


def _computed(
    metric: Metric, output: Any, target: Tensor, metrics: Sequence[Metric]
) -> Tensor | float | None:
    """The metric of a batch; None for one that was not asked for by name, where the targets are not of its kind."""
    found = None if metric.of_batch is None else metric.of_batch(output, target)
    if found is None and metrics is not DEFAULT:
        raise HookrunError(
            f"{WHERE}: {metric.name!r} needs {metric.needs}; these are of shape {list(target.shape)}, {target.dtype}"
        )
    return found

"""The mean loss and metrics of a pass, summed on the device batch by batch and read only when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.tasks.loop import scored as rows_of
from hookrun.tasks.loop.metrics import DEFAULT, LOSS, WHERE, Metric, precise, size_of
from hookrun.tasks.loop.parted import PartAccumulator, PartSums, by_position, by_sample
from hookrun.tasks.loop.scored import Scored

Line = dict[str, Any]


class Average:
    """The mean loss and metrics of the samples seen since the last reset.

    metrics: in the order in which they are shown
    of_loss: (output, targets) -> loss, for the loss of single samples and tokens
    """

    def __init__(
        self,
        metrics: Sequence[Metric] = DEFAULT,
        of_loss: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        self.samples = 0
        self._metrics = metrics
        self._of_loss = of_loss
        self._plan = _MetricPlan.of(metrics)
        self._sums = dict[str, Tensor | float]()
        self._counts = dict[str, int]()
        self._parted = dict[tuple[str, str, str], PartAccumulator]()  # by metric, `by` and split

    def add(
        self,
        loss: Tensor | None,
        output: Any,
        target: Tensor,
        *,
        tokens: bool = False,
        scored: Scored | None = None,
        weight: int | None = None,
        ids: Tensor | None = None,
        split: str = "",
    ) -> None:
        """Add one batch.

        loss:   its mean loss; None: not computed
        tokens: the targets are next tokens, and each token to be predicted counts as a sample
        scored: the rows of which metrics are computed; None: all rows that have a target
        weight: the number of samples or tokens in the mean loss; None: all
        ids:    [B] the numbers of the samples, and with `split` their names, for metrics by sample

        Raises HookrunError if a metric cannot be computed from the output and targets.
        """
        if scored is None and (tokens or self._plan.needs_rows):
            scored = _plain(output, target, tokens=tokens)
        if scored is None and tokens and self._metrics is not DEFAULT and self._plan.computed:
            raise HookrunError(f"{WHERE}: the model's output has no score for each token at each position")
        size = len(scored.with_targets) if scored is not None and tokens else size_of(target)
        weight = size if weight is None else weight
        self.samples += size
        if loss is not None and weight:
            # On the CPU `item` gives the same float64 number at a tenth of the cost.
            self._add(LOSS, (loss.item() if loss.is_cpu else precise(loss)) * weight, weight)
        if not tokens or scored is not None:
            self._compute(output, target, scored if scored is not None and len(scored) else None, tokens)
            if self._plan.parted and ids is not None:
                self._part(output, target, scored, tokens, ids, split, with_loss=loss is not None)

    def _compute(self, output: Any, target: Tensor, scored: Scored | None, tokens: bool) -> None:
        """Add the metrics over all rows of the batch."""
        row_by_row = dict[str, Metric]()
        for name, metric in self._plan.computed.items():
            if metric.of_rows is not None and (metric.of_batch is None or tokens):
                row_by_row[name] = metric
            else:
                own, its_target = (output, target) if not tokens else _whole(scored, target)
                if size := size_of(its_target):
                    self._add(name, _computed(metric, own, its_target, self._metrics), size)
        if scored is None:
            if (lacking := next(iter(row_by_row.values()), None)) is not None and not tokens:
                raise _misfit(lacking, target)
            return
        for name, (source, values) in values_of(list(row_by_row.values()), scored).items():
            self._add(name, values.sum(), len(source))

    @torch.no_grad()
    def _part(
        self,
        output: Any,
        target: Tensor,
        scored: Scored | None,
        tokens: bool,
        ids: Tensor,
        split: str,
        *,
        with_loss: bool,
    ) -> None:
        """Add the metrics that are shown by position or by sample."""
        parted = [each for each in self._plan.parted if with_loss or each.name != LOSS]
        row_by_row = [each for each in parted if each.of_rows is not None]
        found = values_of(row_by_row, scored) if scored is not None and len(scored) else {}
        for metric in parted:
            if metric.name in found:
                source, values = found[metric.name]
            elif tokens:
                source, values = self._of_tokens(metric, scored)
            else:
                self._add_part(metric, split, self._of_samples(metric, output, target, ids))
                continue
            if not len(source):
                continue
            if metric.by == "position" and source.positions is not None:
                self._add_part(metric, "", by_position(values, source.positions))
            else:
                self._add_part(metric, split, by_sample(values, source.samples, ids))

    def _of_tokens(self, metric: Metric, scored: Scored | None) -> tuple[Scored, Tensor]:
        """The rows, and the value at each of them [rows].

        Of the loss, the loss of the token; of a user's own function, its mean over the sample of the token.
        """
        assert scored is not None
        source = scored.with_targets
        if metric.name == LOSS:
            values = [self._loss_of_rows(part.scores, part.targets) for part in source.parts()]
            return source, torch.cat(values) if values else torch.zeros(0)
        whole, means = source.whole(), torch.zeros(len(source), dtype=torch.float64)
        for sample in source.samples.unique():
            chosen = source.samples == sample
            total = _computed(metric, whole[chosen], source.targets[chosen], self._metrics)
            means[chosen.cpu()] = float(total or 0.0) / int(chosen.sum())
        return source, means

    def _loss_of_rows(self, scores: Tensor, targets: Tensor) -> Tensor:
        """[n]: the loss of each token, as a sequence of length 1."""
        assert self._of_loss is not None
        found: Tensor = torch.func.vmap(self._of_loss)(scores[:, None, None], targets[:, None, None])
        return found

    def _of_samples(self, metric: Metric, output: Any, target: Tensor, ids: Tensor) -> PartSums:
        """The metric of each sample, computed as a batch of one."""
        values = []
        for number in range(len(ids)):
            one, its_target = rows_of.one_sample(output, target, number)
            if metric.name == LOSS:
                assert self._of_loss is not None
                values.append(float(self._of_loss(one, its_target)))
            else:
                values.append(float(_computed(metric, one, its_target, self._metrics) or 0.0))
        sums = torch.tensor(values, dtype=torch.float64)
        return PartSums(ids.clone(), sums, torch.ones(len(ids), dtype=torch.int64))

    def _add(self, name: str, total: Tensor | float | None, count: int) -> None:
        if total is None:
            return
        if isinstance(total, Tensor) and total.is_cpu:
            total = total.item()  # on the CPU this needs no synchronization
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + count

    def _add_part(self, metric: Metric, split: str, rows: PartSums) -> None:
        self._parted.setdefault((metric.name, str(metric.by), split), PartAccumulator()).add(rows)

    # ---- saved states, sums of other ranks and of steps ------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values and tensors."""
        parted = [[*key, each.state_dict()] for key, each in self._parted.items()]
        return {
            "samples": self.samples,
            "sums": dict(self._sums),
            "counts": dict(self._counts),
            "parted": parted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        self.samples, self._sums = state["samples"], dict(state["sums"])
        self._counts = dict(state["counts"])
        self._parted = {}
        for name, by, split, rows in state["parted"]:
            self._parted[name, by, split] = PartAccumulator()
            self._parted[name, by, split].load_state_dict(rows)

    def clear(self) -> None:
        """Forget all samples."""
        self.samples = 0
        self._sums.clear()
        self._counts.clear()
        self._parted.clear()

    def include(self, other: Average) -> None:
        """Add the sums of another Average of the same metrics."""
        self.samples += other.samples
        for name, total in other._sums.items():
            self._add(name, total, other._counts[name])
        for key, parted in other._parted.items():
            self._parted.setdefault(key, PartAccumulator()).include(parted)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, float]:
        """`loss` and the metrics by name, `accuracy` as a fraction; those without a value are left out."""
        names = dict.fromkeys([LOSS, *(metric.name for metric in self._metrics)])
        shown = {metric.name: metric.shown for metric in self._metrics}
        return {
            name: shown.get(name, float)(float(self._sums[name]) / count)
            for name in names
            if (count := self._counts.get(name, 0))
        }

    def lines(self) -> Iterator[tuple[str, Line]]:
        """(split, a line of metrics.jsonl) for each position and sample; the split is ``""`` for positions."""
        shown = {metric.name: metric.shown for metric in self._metrics}
        columns = dict.fromkeys((by, split) for _, by, split in self._parted)
        for by, split in columns:
            lines = dict[tuple[int, int], Line]()
            for (name, each_by, each_split), parted in self._parted.items():
                if (each_by, each_split) != (by, split):
                    continue
                rows = parted.whole()
                for key, total, count in zip(
                    rows.keys.tolist(), rows.sums.tolist(), rows.counts.tolist(), strict=True
                ):
                    # A line has one count of tokens, so metrics with different counts need several lines.
                    place = (key, count if by == "position" else 0)
                    line = lines.setdefault(place, {"of": by, by: key})
                    line[name] = shown[name](total / count)
            for (_, count), line in sorted(lines.items()):
                yield split, line | ({"tokens": count} if by == "position" else {})


@dataclass(frozen=True)
class _MetricPlan:
    """What to compute for each batch, decided once.

    computed:   the metrics that are computed from outputs, by name; the loss is not one of them
    parted:     the metrics that are shown by position or by sample
    needs_rows: some metric is computed row by row even if the targets are not tokens
    """

    computed: Mapping[str, Metric]
    parted: Sequence[Metric]
    needs_rows: bool

    @classmethod
    def of(cls, metrics: Sequence[Metric]) -> _MetricPlan:
        """The plan for these metrics."""
        computed = {
            each.name: each for each in metrics if each.of_batch is not None or each.of_rows is not None
        }
        parted = [each for each in metrics if each.by is not None]
        by_row = any(each.of_rows is not None and each.of_batch is None for each in computed.values())
        return cls(computed, parted, by_row or bool(parted))


def _plain(output: Any, target: Tensor, *, tokens: bool) -> Scored | None:
    """All rows that have a target, which are scored if no other rows are given; None if the output has no such rows."""
    if not tokens:
        return rows_of.of_labels(output, target)
    return rows_of.of_tokens(output, target, target != IGNORED, torch.zeros_like(target))


def _whole(scored: Scored | None, target: Tensor) -> tuple[Any, Tensor]:
    """Scores [N, classes] and targets [N] of the rows that have a target."""
    if scored is None:
        return None, target.new_empty(0)
    return scored.with_targets.whole(), scored.with_targets.targets


@torch.no_grad()
def values_of(metrics: Sequence[Metric], scored: Scored) -> dict[str, tuple[Scored, Tensor]]:
    """Name -> the rows from which the metric is computed, and its value [N] float64 at each of them."""
    targeted = scored.with_targets
    found = dict[str, tuple[Scored, list[Tensor]]]()
    for metric in metrics:
        found[metric.name] = (scored if metric.targetless else targeted, [])
    for source in [scored] if scored is targeted else [scored, targeted]:
        due = {each.name: each for each in metrics if found[each.name][0] is source}
        for part in source.parts() if due else ():
            for name, metric in due.items():
                assert metric.of_rows is not None
                found[name][1].append(precise(metric.of_rows(part)))
    return {
        name: (source, torch.cat(values) if values else torch.zeros(0))
        for name, (source, values) in found.items()
    }


def _computed(
    metric: Metric, output: Any, target: Tensor, metrics: Sequence[Metric]
) -> Tensor | float | None:
    """The metric of a batch; None for a default metric that does not apply to these targets.

    Raises HookrunError for a metric that was requested by name and does not apply.
    """
    found = None if metric.of_batch is None else metric.of_batch(output, target)
    if found is None and metrics is not DEFAULT:
        raise _misfit(metric, target)
    return found


def _misfit(metric: Metric, target: Tensor) -> HookrunError:
    return HookrunError(
        f"{WHERE}: {metric.name!r} needs {metric.needs}; the targets have shape {list(target.shape)}, {target.dtype}"
    )

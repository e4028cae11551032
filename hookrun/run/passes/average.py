"""The mean loss and metrics of a pass, summed on the device batch by batch and read only when needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.engine.plan.table import size
from hookrun.engine.values.index import Target
from hookrun.engine.values.tensors import read_together
from hookrun.errors import HookrunError, listed
from hookrun.run.experiment.metrics.metrics import DEFAULT, LOSS, Metric
from hookrun.run.experiment.metrics.over_split import SplitRows, in_order
from hookrun.run.experiment.metrics.rows import BatchRows, precise, precise_dtype

Line = dict[str, Any]
Cell = tuple[Tensor | float, int]
"""A sum of values, and their number."""

Column = tuple[str, str, str]
"""The name of a metric, and if it is shown by position or by sample, which of these and the split."""

_WHOLE = ("", "")
"""The rest of the column of the mean over all samples, which has one cell, 0."""


class Average:
    """The mean loss and metrics of the samples seen since the last reset, also by position and by sample.

    metrics:   in the order in which they are shown
    of_loss:   (output, targets) -> loss, for the loss of single samples and tokens
    max_rows:  how many rows are kept at most for metrics over the whole split
    """

    def __init__(
        self,
        metrics: Sequence[Metric] = DEFAULT,
        of_loss: Callable[[Any, Tensor], Tensor] | None = None,
        max_rows: float = math.inf,
    ) -> None:
        self.samples = 0
        self.max_rows = max_rows
        # Name of a metric over the whole split -> of each batch: numbers of the samples, targets and scores.
        self._rows = dict[str, list[list[Tensor]]]()
        self._metrics = metrics
        self._of_loss = of_loss
        computed = {metric.name: metric for metric in metrics if metric.name != LOSS}.values()
        # Of samples, and of tokens: the metrics that are computed from the same rows.
        self._computed: dict[bool, dict[tuple[Target | None, bool], list[Metric]]] = {False: {}, True: {}}
        for of_tokens, groups in self._computed.items():
            for metric in computed:
                source = metric.of, metric.needs_target(of_tokens=of_tokens)
                groups.setdefault(source, []).append(metric)
        self._by_batch = set[str]()  # those of a user's own that have one value for a batch
        self._grouped = [metric for metric in metrics if metric.by is not None]
        self._over_split = [metric for metric in metrics if metric.over is not None]
        self._cells = dict[Column, dict[int, Cell]]()

    def add(
        self,
        loss: Tensor | None,
        rows: BatchRows,
        *,
        weight: int | None = None,
        ids: Tensor | None = None,
        split: str = "",
    ) -> None:
        """Add one batch.

        loss:   its mean loss; None: not computed
        rows:   its samples, or the chosen tokens; each token with a target counts as a sample
        weight: the number of samples or tokens in the mean loss; None: all
        ids:    [B] the numbers of the samples, and with `split` their names, for metrics by sample

        Raises HookrunError if a metric cannot be computed from the output and targets.
        """
        size = len(rows) if rows.samples is None else len(rows.with_targets)
        weight = size if weight is None else weight
        self.samples += size
        if loss is not None and weight:
            # On the CPU `item` gives the same float64 number at a tenth of the cost.
            self._add((LOSS, *_WHOLE), 0, (loss.item() if loss.is_cpu else precise(loss)) * weight, weight)
        values = self._values(rows)
        if self._over_split and ids is not None:
            self._keep(values, ids, split)
        for name, (source, column) in values.items():
            is_count = column.dtype is torch.bool  # then counting is three times faster than summing
            total = column.count_nonzero() if is_count else column.sum(dtype=precise_dtype(column))
            count = len(source)
            if source.counts is not None:
                total = (column * source.counts.to(column.device)).sum(dtype=precise_dtype(column))
                count = int(source.counts.sum())
            if count:
                self._add((name, *_WHOLE), 0, total, count)
        if self._grouped and ids is not None:
            self._add_groups(rows, values, ids, split, with_loss=loss is not None)

    def _keep(self, values: dict[str, tuple[BatchRows, Tensor]], ids: Tensor, split: str) -> None:
        """Take the metrics over the whole split out of `values`, and keep their rows, those of the same rows once."""
        parts = dict[int, list[Tensor]]()
        for name in {metric.name for metric in self._over_split} & values.keys():
            rows, scores = values.pop(name)
            if id(rows) not in parts:
                places = rows.chosen if rows.samples is None else rows.samples
                numbers = ids if places is None else ids[places.cpu()]
                numbers = numbers + (SPLITS.index(split) << 40)  # two splits may have the same numbers
                parts[id(rows)] = [
                    each.detach().to("cpu", copy=True) for each in (numbers, rows.targets, scores)
                ]
            self._rows.setdefault(name, []).append(parts[id(rows)])
        self._check_size()

    def _check_size(self) -> None:
        if self._rows and self.samples > self.max_rows:
            kept = sum(tensor.nbytes for part in next(iter(self._rows.values())) for tensor in part)
            raise HookrunError(
                f"task.max_rows: {listed(self._rows)} of the whole split: the scores of {self.samples:,} rows take "
                f"{size(kept)}, and {self.max_rows:,} rows are allowed; limit the run by train.limit_batches, or allow "
                "more"
            )

    def _values(self, rows: BatchRows) -> dict[str, tuple[BatchRows, Tensor]]:
        """Name -> the rows from which the metric is computed, and its value at each of them."""
        values = dict[str, tuple[BatchRows, Tensor]]()
        for (of, at_target), metrics in self._computed[rows.samples is not None].items():
            source = rows if of is None else rows.of_paths[of]
            source = source.with_targets if at_target else source
            columns: dict[str, list[Tensor]] = {metric.name: [] for metric in metrics}
            for part in source.parts():
                for metric in metrics:
                    if metric.of_rows is not None and (column := metric.of_rows(part)) is not None:
                        columns[metric.name].append(column)
            for metric in metrics if len(source) else ():
                column_parts = columns[metric.name]
                if metric.of_batch is not None:
                    with torch.no_grad():
                        value = metric.of_batch(*source.whole())
                    if not value.dim():
                        self._by_batch.add(metric.name)
                    column_parts.append(value.expand(len(source)))
                if column_parts and (metric.fits is None or metric.fits(source)):
                    whole = column_parts[0] if len(column_parts) == 1 else torch.cat(column_parts)
                    # a user's own function computes its own mean
                    values[metric.name] = (
                        source if metric.of_batch is None else replace(source, counts=None),
                        whole,
                    )
                elif self._metrics is not DEFAULT:
                    raise metric.misfit(rows)
        return values

    @torch.no_grad()
    def _add_groups(
        self,
        rows: BatchRows,
        values: Mapping[str, tuple[BatchRows, Tensor]],
        ids: Tensor,
        split: str,
        *,
        with_loss: bool,
    ) -> None:
        """Add the metrics that are shown by position or by sample."""
        for metric in self._grouped:
            if metric.name == LOSS and with_loss:
                assert self._of_loss is not None
                source = rows if rows.samples is None else rows.with_targets
                column = losses(source, self._of_loss)
            elif metric.name in self._by_batch:
                raise HookrunError(
                    f"{metric.where}.by: {metric.name!r} returned one number for a batch, by: {metric.by} needs one "
                    "for each row; return a tensor [batch], or leave `by` out"
                )
            elif metric.name in values:
                source, column = values[metric.name]
            else:
                continue
            if metric.by == "position" and source.positions is not None:
                keys, place = source.positions, (metric.name, "position", "")
            else:
                keys = ids if source.samples is None else ids[source.samples.cpu()]
                place = (metric.name, "sample", split)
            # On the CPU the order of the additions is always the same.
            column = column.detach().cpu().to(torch.float64)
            unique, places = keys.cpu().unique(return_inverse=True)
            sums = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, places, column)
            counts = torch.bincount(places, minlength=len(unique))
            for key, total, count in zip(unique.tolist(), sums.tolist(), counts.tolist(), strict=True):
                self._add(place, key, total, count)

    def _add(self, column: Column, key: int, total: Tensor | float, count: int) -> None:
        if isinstance(total, Tensor) and total.is_cpu:
            total = total.item()  # on the CPU this needs no synchronization
        cells = self._cells.setdefault(column, {})
        before = cells.get(key)
        cells[key] = (total, count) if before is None else (before[0] + total, before[1] + count)

    def empty(self) -> Average:
        """An Average of the same metrics, without samples."""
        return Average(self._metrics, self._of_loss, self.max_rows)

    def means(self) -> Average:
        """The same sums, without metrics over the whole split and without their rows."""
        if not self._over_split:
            return self
        metrics = [metric for metric in self._metrics if metric.over is None]
        means = Average(metrics, self._of_loss)
        means.samples, means._cells = self.samples, self._cells
        return means

    # ---- saved states, sums of other ranks and of steps ------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values and tensors."""
        cells = [
            [
                *column,
                torch.tensor(list(cells), dtype=torch.int64, device="cpu"),
                torch.tensor([total for total, _ in cells.values()], dtype=torch.float64, device="cpu"),
                torch.tensor([count for _, count in cells.values()], dtype=torch.int64, device="cpu"),
            ]
            for column, cells in self._cells.items()
        ]
        return {"samples": self.samples, "cells": cells, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        self.samples, self._rows = state["samples"], state.get("rows", {})  # earlier versions saved no rows
        self._cells = {
            (name, by, split): dict(
                zip(keys.tolist(), zip(sums.tolist(), counts.tolist(), strict=True), strict=True)
            )
            for name, by, split, keys, sums, counts in state["cells"]
        }

    def clear(self) -> None:
        """Forget all samples."""
        self.samples = 0
        self._cells.clear()
        self._rows.clear()

    def include(self, other: Average) -> None:
        """Add the sums of another Average of the same metrics."""
        self.samples += other.samples
        for name, parts in other._rows.items():
            self._rows.setdefault(name, []).extend(parts)
        self._check_size()
        for column, cells in other._cells.items():
            for key, (total, count) in cells.items():
                self._add(column, key, total, count)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, float]:
        """`loss` and the metrics by name, `accuracy` as a fraction; those without a value are left out."""
        shown = {LOSS: float, **{metric.name: metric.shown for metric in self._metrics}}
        columns = {name: self._cells.get((name, *_WHOLE)) for name in shown}
        totals = {name: cells[0] for name, cells in columns.items() if cells}
        on_device = {name: total for name, (total, _) in totals.items() if isinstance(total, Tensor)}
        read = dict(zip(on_device, read_together(on_device.values()), strict=True))
        return {
            name: shown[name](float(read.get(name, total)) / count) for name, (total, count) in totals.items()
        }

    def over_split(self) -> tuple[dict[str, float], list[str]]:
        """The metrics over the whole split by name, NaN where one is not defined, and notes on them."""
        values, notes = dict[str, float](), list[str]()
        for metric in self._over_split:
            if metric.name not in self._rows:
                raise HookrunError(
                    f"{metric.where}: {metric.name!r} has no value, because no row has a target"
                )
            numbers, targets, scores = zip(*self._rows[metric.name], strict=True)
            order = torch.cat(numbers).argsort(stable=True)
            rows = SplitRows(in_order(scores, order), in_order(targets, order))
            of_metric = metric.of_split(rows)
            values |= of_metric
            notes += [f"{metric.name}: {note}" for note in rows.notes]
            lacking = [name for name, value in of_metric.items() if math.isnan(value)]
            if lacking:
                why = rows.why_not() if metric.code is None else "the function returned NaN"
                notes.append(f"{listed(lacking)}: not defined, because {why}")
        return values, notes

    def lines(self) -> Iterator[tuple[str, Line]]:
        """(split, a line of metrics.jsonl) for each position and sample; the split is ``""`` for positions."""
        shown = {metric.name: metric.shown for metric in self._metrics}
        groups = list(dict.fromkeys((by, split) for _, by, split in self._cells if by))
        lines = dict[tuple[int, int, int], Line]()
        for (name, by, split), cells in self._cells.items():
            for key, (total, count) in cells.items() if by else ():
                # A line has one count of tokens, so metrics with different counts need several lines.
                tokens = {"tokens": count} if by == "position" else {}
                place = groups.index((by, split)), key, tokens.get("tokens", 0)
                line = lines.setdefault(place, {"of": by, by: key, **tokens})
                line[name] = shown[name](float(total) / count)
        for place in sorted(lines):
            yield groups[place[0]][1], lines[place]


def losses(rows: BatchRows, of_loss: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """[n]: the loss of each sample as a batch of one, or of each token as a sequence of length 1."""
    if rows.samples is None:
        return sample_by_sample(rows, of_loss)
    of_each = torch.func.vmap(of_loss)
    values = [of_each(part.scores[:, None, None], part.targets[:, None, None]) for part in rows.parts()]
    return torch.cat(values) if values else torch.zeros(0)


def sample_by_sample(rows: BatchRows, function: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """[n]: the value of a function of a batch for each sample, computed as a batch of this sample alone."""
    return torch.stack([function(*rows.of_sample(number)).reshape(()) for number in range(len(rows))])

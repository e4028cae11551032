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
from hookrun.run.experiment.metrics.metrics import DEFAULT, LOSS, Metric, row_values
from hookrun.run.experiment.metrics.over_split import SplitRows, in_order
from hookrun.run.experiment.metrics.rows import BatchRows, precise, precise_dtype

Line = dict[str, Any]
Cell = tuple[Tensor | float, int]
"""A sum of values, and their number."""

Column = tuple[str, str, str]
"""The name of a metric, and if it is shown by position or by sample, which of these and the split."""

RowValues = tuple[BatchRows, Tensor]
"""Some rows, and the value of a metric at each of them."""

_WHOLE = ("", "")
"""The rest of the column of the mean over all samples, which has one cell, 0."""


Together = dict[tuple[Target | None, bool], list[Metric]]


def _together(metrics: Sequence[Metric], *, of_tokens: bool) -> Together:
    """(Path, only rows that have a target) -> the metrics that are computed from these rows, each once."""
    together: Together = {}
    for metric in {metric.name: metric for metric in metrics if metric.name != LOSS}.values():
        rows = metric.of, metric.needs_target(of_tokens=of_tokens)
        together.setdefault(rows, []).append(metric)
    return together


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
        self._grouped = [metric for metric in metrics if metric.by is not None]
        self._over_split = [metric for metric in metrics if metric.over is not None]
        self._of_samples = _together(metrics, of_tokens=False)
        self._of_tokens = _together(metrics, of_tokens=True)
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
            mean = loss.item() if loss.is_cpu else precise(loss)
            self._add((LOSS, *_WHOLE), 0, mean * weight, weight)
        values = self._values(rows)
        if self._over_split and ids is not None:
            self._keep(values, ids, split)
        for name, (source, column) in values.items():
            self._add_column(name, column, source.counts)
        if self._grouped and ids is not None:
            self._add_groups(rows, values, ids, split, with_loss=loss is not None)

    def _add_column(self, name: str, column: Tensor, counts: Tensor | None) -> None:
        """Add the values of all rows. counts: how often each row counts; None: once."""
        count = len(column)
        if counts is not None:
            count = int(counts.sum())
            total = (column * counts.to(column.device)).sum(dtype=precise_dtype(column))
        elif column.dtype is torch.bool:
            total = column.count_nonzero()  # three times faster than a sum
        else:
            total = column.sum(dtype=precise_dtype(column))
        if count:
            self._add((name, *_WHOLE), 0, total, count)

    def _keep(self, values: dict[str, RowValues], ids: Tensor, split: str) -> None:
        """Take the metrics over the whole split out of `values`, and keep their rows, those of the same rows once."""
        parts: dict[int, list[Tensor]] = {}
        for name in {metric.name for metric in self._over_split} & values.keys():
            rows, scores = values.pop(name)
            if id(rows) not in parts:
                places = rows.chosen if rows.samples is None else rows.samples
                numbers = ids if places is None else ids[places.cpu()]
                numbers = numbers + (SPLITS.index(split) << 40)  # two splits may have the same numbers
                columns = (numbers, rows.targets, scores)
                parts[id(rows)] = [column.detach().to("cpu", copy=True) for column in columns]
            self._rows.setdefault(name, []).append(parts[id(rows)])
        self._check_size()

    def _check_size(self) -> None:
        if not self._rows or self.samples <= self.max_rows:
            return
        first = next(iter(self._rows.values()))
        kept = sum(tensor.nbytes for part in first for tensor in part)
        raise HookrunError(
            f"task.max_rows: {listed(self._rows)} of the whole split: the scores of {self.samples:,} rows take "
            f"{size(kept)}, and {self.max_rows:,} rows are allowed; limit the run by train.limit_batches, or allow "
            "more"
        )

    def _values(self, rows: BatchRows) -> dict[str, RowValues]:
        """Name -> the rows from which the metric is computed, and its value at each of them."""
        together = self._of_samples if rows.samples is None else self._of_tokens
        values: dict[str, RowValues] = {}
        for (path, at_target), metrics in together.items():
            source = rows if path is None else rows.of_paths[path]
            if at_target:
                source = source.with_targets
            columns = row_values(metrics, source)
            for metric in metrics:
                column = columns.get(metric.name)
                if column is not None and metric.of_batch is not None:
                    self._check_by(metric.name, column)
                    # a user's own function computes its own mean
                    values[metric.name] = (replace(source, counts=None), column.expand(len(source)))
                elif column is not None:
                    values[metric.name] = (source, column)
                elif len(source) and self._metrics is not DEFAULT:
                    raise metric.misfit(rows)
        return values

    def _check_by(self, name: str, column: Tensor) -> None:
        """Raise HookrunError if a function that has one value for a batch is to be shown by position or by sample."""
        for metric in self._grouped:
            if metric.name == name and not column.dim():
                raise HookrunError(
                    f"{metric.where}.by: {name!r} returned one number for a batch, by: {metric.by} needs one "
                    "for each row; return a tensor [batch], or leave `by` out"
                )

    @torch.no_grad()
    def _add_groups(
        self,
        rows: BatchRows,
        values: Mapping[str, RowValues],
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
                column = source.one_by_one(self._of_loss)
            elif metric.name in values:
                source, column = values[metric.name]
            else:
                continue
            if metric.by == "position" and source.positions is not None:
                keys = source.positions
                place = (metric.name, "position", "")
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
        if key in cells:
            before, number = cells[key]
            cells[key] = (before + total, number + count)
        else:
            cells[key] = (total, count)

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
        columns: list[list[Any]] = []
        for column, cells in self._cells.items():
            keys = torch.tensor(list(cells), dtype=torch.int64, device="cpu")
            sums = [total for total, _ in cells.values()]
            counts = [count for _, count in cells.values()]
            columns.append(
                [
                    *column,
                    keys,
                    torch.tensor(sums, dtype=torch.float64, device="cpu"),
                    torch.tensor(counts, dtype=torch.int64, device="cpu"),
                ]
            )
        return {"samples": self.samples, "cells": columns, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        self.samples = state["samples"]
        self._rows = state.get("rows", {})  # earlier versions saved no rows
        self._cells = {}
        for name, by, split, keys, sums, counts in state["cells"]:
            cells = zip(sums.tolist(), counts.tolist(), strict=True)
            self._cells[name, by, split] = dict(zip(keys.tolist(), cells, strict=True))

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
        shown = {LOSS: float, **self._shown()}
        totals: dict[str, Cell] = {}
        on_device: dict[str, Tensor] = {}
        for name in shown:
            cells = self._cells.get((name, *_WHOLE))
            if cells:
                totals[name] = cells[0]
                total, _ = cells[0]
                if isinstance(total, Tensor):
                    on_device[name] = total
        read = dict(zip(on_device, read_together(on_device.values()), strict=True))
        means: dict[str, float] = {}
        for name, (total, count) in totals.items():
            means[name] = shown[name](float(read.get(name, total)) / count)
        return means

    def _shown(self) -> dict[str, Callable[[float], float]]:
        """Name of each metric -> mean -> the value that is shown."""
        return {metric.name: metric.shown for metric in self._metrics}

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
            metric_values = metric.of_split(rows)
            values |= metric_values
            notes += [f"{metric.name}: {note}" for note in rows.notes]
            lacking = [name for name, value in metric_values.items() if math.isnan(value)]
            if lacking:
                why = rows.why_not() if metric.code is None else "the function returned NaN"
                notes.append(f"{listed(lacking)}: not defined, because {why}")
        return values, notes

    def lines(self) -> Iterator[tuple[str, Line]]:
        """(split, a line of metrics.jsonl) for each position and sample; the split is ``""`` for positions."""
        shown = self._shown()
        groups = list(dict.fromkeys((by, split) for _, by, split in self._cells if by))
        lines: dict[tuple[int, int, int], Line] = {}
        for (name, by, split), cells in self._cells.items():
            if not by:
                continue
            group = groups.index((by, split))
            for key, (total, count) in cells.items():
                # A line has one count of tokens, so metrics with different counts need several lines.
                if by == "position":
                    line = lines.setdefault((group, key, count), {"of": by, by: key, "tokens": count})
                else:
                    line = lines.setdefault((group, key, 0), {"of": by, by: key})
                line[name] = shown[name](float(total) / count)
        for group, key, tokens in sorted(lines):
            _, split = groups[group]
            yield split, lines[group, key, tokens]

"""metrics.jsonl: the latest value of each metric, at the top of the page, its curves, and its parts.

The parts are metrics by position and by sample (`by:` in `task.metrics`): a curve over positions, the worst samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hookrun.report.curves import MOST_MARKS, MOST_OPEN_METRICS, Mark, fold
from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.draw.text import number
from hookrun.report.facts import RunData
from hookrun.report.lines import is_place, numbers
from hookrun.report.trips import mark
from hookrun.store.objective import Direction, direction_of, is_loss
from hookrun.store.scores import ABOUT, Line, is_batch, is_part

MOST_FIGURES = 60
MOST_BY_POSITION = 20
MOST_CURVES = 16
MOST_LATEST = 100
MOST_WORST = 10
"""Tables of the worst samples, and the samples in each."""

Curves = dict[tuple[str, bool], tuple[list[float], list[float]]]
"""The steps and values of each split, of single batches or not."""

_PLACES = {"loss": 0, "accuracy": 1, "lr": 2}
_ABOUT_PARTS = {*ABOUT, "position", "sample", "tokens"}


def curves_of(facts: RunData) -> dict[str, Curves]:
    """The curves of each metric that has steps."""
    by_name: dict[str, Curves] = {}
    for line, split, step, values in _measured(facts):
        for name, value in values.items():
            curves = by_name.setdefault(name, Curves())
            xs, ys = curves.setdefault((split, is_batch(line)), ([], []))
            xs.append(step)
            ys.append(value)
    return by_name


def chart(name: str, curves: Curves, facts: RunData) -> Figure:
    """A chart of a metric; rules over time mark the training loss."""
    trips = [trip for trip in facts.trips if trip.get("of") == name == "loss" and trip["mode"] == "train"]
    series = _series(curves, list(map(mark, trips[:MOST_MARKS])))
    return lines(name, series[:MOST_CURVES], x="step", y=name)


def build(facts: RunData) -> list[Figure] | None:
    """One chart for each metric with more than one value, with a curve for each split; no chart of a constant lr.

    Single training batches are a thin curve, epoch means have points. Beyond `MOST_OPEN_METRICS` they are folded.
    """
    by_name = curves_of(facts)
    figures: list[Figure] = []
    for name in sorted(by_name, key=lambda name: (_PLACES.get(name, 9), name)):
        heights = [ys for _, ys in by_name[name].values()]
        is_constant = name == "lr" and len(set(chain.from_iterable(heights))) == 1
        if max(map(len, heights)) > 1 and not is_constant:
            figures.append(chart(name, by_name[name], facts))
    return fold(figures[:MOST_FIGURES], MOST_OPEN_METRICS) or None


def _series(curves: Curves, marks: Sequence[Mark]) -> list[Series]:
    """The curves of a metric; those of single batches are thin beside means. Marks are of the training's steps."""
    has_means = any(not of_batches for _, of_batches in curves)
    series: list[Series] = []
    for (split, of_batches), (xs, ys) in curves.items():
        if of_batches and has_means:
            series.append(Series(f"{split}, single batches", xs, ys, thin=True))
        else:
            series.append(Series(split, xs, ys))
        if (split, of_batches) == ("train", ("train", True) in curves):
            series[-1] = replace(series[-1], marks=marks)
    return series


def latest(facts: RunData) -> list[dict[str, Any]]:
    """The latest and the best value of each metric on each split; for losses the best is the smallest.

    Values of single batches are used only if the split has no means.

    of_batch: of a single batch, not a mean
    total:    of a rate, of how many samples it is; None for other metrics
    """
    lines = list(_measured(facts))
    with_means = set[tuple[str, str]]()
    for line, split, _, values in lines:
        if not is_batch(line):
            with_means.update((split, name) for name in values)
    measured: dict[tuple[str, str], list[dict[str, float]]] = {}
    for line, split, _, values in lines:
        for name in values:
            if name != "lr" and not (is_batch(line) and (split, name) in with_means):
                measured.setdefault((split, name), []).append(values)
    shown: list[dict[str, Any]] = []
    for (split, name), of_name in list(measured.items())[:MOST_LATEST]:
        numbers = [values[name] for values in of_name if not math.isnan(values[name])]
        best = min if is_loss(name) else max
        last = of_name[-1]
        shown.append(
            {
                "split": split,
                "name": name,
                "last": last[name],
                "best": best(numbers, default=math.nan),
                "of_batch": (split, name) not in with_means,
                "total": last.get("samples") if name == "changed" else None,
            }
        )
    return shown


def _measured(facts: RunData) -> Iterator[tuple[Line, str, int, dict[str, float]]]:
    """(line, split, step, metrics) of lines with a step, which lines of analyses do not have."""
    for line in facts.metrics.records:
        if isinstance(line.get("step"), int) and not is_part(line):
            yield line, str(line.get("split", "")), line["step"], numbers(line, without=ABOUT)


def parts_of_passes(facts: RunData) -> dict[str, Any] | None:
    """Charts by position, and tables of the worst samples; None without either.

    tables: for each metric and split, of those of which it is known whether small or large is better, a title, and
            (sample, file and class, value) of the worst samples, worst first
    """
    curves = defaultdict[str, list[Series]](list)
    for split, name, values in _last_pass(facts, "position"):
        places = sorted(values)
        curves[name].append(Series(split, places, [values[place] for place in places]))
    figures: list[Figure] = []
    for name, series in curves.items():
        if max(len(curve.x) for curve in series) > 1:
            figures.append(lines(f"{name} by position", series, x="position, from the first token", y=name))
    tables: list[tuple[str, list[tuple[int, str, str]]]] = []
    for split, name, values in _last_pass(facts, "sample"):
        direction = direction_of(name)
        if direction is None:
            continue
        rows: list[tuple[int, str, str]] = []
        for sample in _worst(values, direction)[:MOST_WORST]:
            rows.append((sample, facts.called.get((split, sample), ""), number(float(values[sample]))))
        tables.append((f"{split}: the worst of {len(values):,} samples by {name}", rows))
    if not figures and not tables:
        return None
    return {"figures": figures[:MOST_BY_POSITION], "tables": tables[:MOST_WORST]}


def _worst(values: Mapping[int, float], direction: Direction) -> list[int]:
    """The samples from the worst value to the best; NaN is the worst."""

    def badness(sample: int) -> float:
        value = values[sample]
        if math.isnan(value):
            return math.inf
        return value if direction == "minimize" else -value

    return sorted(values, key=badness, reverse=True)


def _last_pass(facts: RunData, part: str) -> Iterator[tuple[str, str, dict[int, float]]]:
    """(split, metric, position or sample -> value) of the last pass over each split."""
    passes: dict[str, dict[tuple[Any, Any], list[dict[str, Any]]]] = {}
    for line in facts.metrics.records:
        if line.get("of") == part and is_place(line.get(part)):
            of_split = passes.setdefault(str(line.get("split", "")), {})
            of_split.setdefault((line.get("epoch"), line.get("step")), []).append(line)
    for split, of_split in passes.items():
        by_name: dict[str, dict[int, float]] = {}
        for line in list(of_split.values())[-1]:
            for name, value in numbers(line, without=_ABOUT_PARTS).items():
                by_name.setdefault(name, {})[line[part]] = value
        for name, values in by_name.items():
            yield split, name, values

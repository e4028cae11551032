"""metrics.jsonl: the latest value of each metric, at the top of the page, its curves, and its parts.

The parts are metrics by position and by sample (`by:` in `task.metrics`): a curve over positions, the worst samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.draw.text import number
from hookrun.report.facts import Facts
from hookrun.report.lines import is_place, numbers
from hookrun.store.objective import direction_of, is_loss
from hookrun.store.records import grouped
from hookrun.store.scores import ABOUT, Line, is_batch, is_part

MOST_FIGURES = 60
MOST_BY_POSITION = 20
MOST_CURVES = 16
MOST_LATEST = 100
MOST_WORST = 10
"""Tables of the worst samples, and the samples in each."""

_PLACES = {"loss": 0, "accuracy": 1, "lr": 2}
_ABOUT_PARTS = {*ABOUT, "position", "sample", "tokens"}


def build(facts: Facts) -> list[Figure] | None:
    """One chart for each metric with more than one value, with a curve for each split; no chart of a constant lr.

    Single training batches are a thin curve, epoch means have points.
    """
    points = (
        (name, (split, is_batch(line)), step, value)
        for line, split, step, values in _measured(facts)
        for name, value in values.items()
    )
    by_name = grouped(points, itemgetter(0))
    figures = []
    for name in sorted(by_name, key=lambda name: (_PLACES.get(name, 9), name)):
        curves = grouped(by_name[name], itemgetter(1))
        thin_too = any(not single for _, single in curves)
        series = [
            Series(
                f"{split}, single batches" if single and thin_too else split,
                [x for *_, x, _ in curve],
                [y for *_, y in curve],
                thin=single and thin_too,
            )
            for (split, single), curve in curves.items()
        ]
        is_constant = name == "lr" and len({y for each in series for y in each.y}) == 1
        if max(len(each.x) for each in series) > 1 and not is_constant:
            figures.append(lines(name, series[:MOST_CURVES], x="step", y=name))
    return figures[:MOST_FIGURES] or None


def latest(facts: Facts) -> list[dict[str, Any]]:
    """The latest and the best value of each metric on each split; for losses the best is the smallest.

    Values of single batches are used only if the split has no means.

    of_batch: of a single batch, not a mean
    total:    of a rate, of how many samples it is; None for other metrics
    """
    lines = list(_measured(facts))
    with_means = {(split, name) for line, split, _, values in lines if not is_batch(line) for name in values}
    measured = (
        (split, name, values, is_batch(line))
        for line, split, _, values in lines
        for name in values
        if name != "lr" and not (is_batch(line) and (split, name) in with_means)
    )
    shown = list[dict[str, Any]]()
    for (split, name), of_name in grouped(measured, itemgetter(0, 1)).items():
        *_, last, of_batch = of_name[-1]
        known = [values[name] for _, _, values, _ in of_name if not math.isnan(values[name])]
        best = (min if is_loss(name) else max)(known, default=math.nan)
        shown.append(
            {
                "split": split,
                "name": name,
                "last": last[name],
                "best": best,
                "of_batch": of_batch,
                "total": last.get("samples") if name == "changed" else None,
            }
        )
    return shown[:MOST_LATEST]


def _measured(facts: Facts) -> Iterator[tuple[Line, str, int, dict[str, float]]]:
    """(line, split, step, metrics) of lines with a step, which lines of analyses do not have."""
    return (
        (line, str(line.get("split", "")), line["step"], numbers(line, without=ABOUT))
        for line in facts.metrics.records
        if isinstance(line.get("step"), int) and not is_part(line)
    )


def parts_of_passes(facts: Facts) -> dict[str, Any] | None:
    """Charts by position, and tables of the worst samples; None without either.

    tables: for each metric and split, of those of which it is known whether small or large is better, a title, and
            (sample, file and class, value) of the worst samples, worst first
    """
    curves = defaultdict[str, list[Series]](list)
    for split, name, values in _last_pass(facts, "position"):
        places = sorted(values)
        curves[name].append(Series(split, places, [values[place] for place in places]))
    figures = [
        lines(f"{name} by position", series, x="position, from the first token", y=name)
        for name, series in curves.items()
        if max(len(each.x) for each in series) > 1
    ]
    tables = list[tuple[str, list[tuple[int, str, str]]]]()
    for split, name, values in _last_pass(facts, "sample"):
        if (direction := direction_of(name)) is None:
            continue
        sign = 1 if direction == "minimize" else -1
        known = {sample: math.inf if math.isnan(value) else sign * value for sample, value in values.items()}
        worst = sorted(values, key=known.__getitem__, reverse=True)[:MOST_WORST]
        rows = [(each, facts.called.get((split, each), ""), number(float(values[each]))) for each in worst]
        tables.append((f"{split}: the worst of {len(values):,} samples by {name}", rows))
    if not figures and not tables:
        return None
    return {"figures": figures[:MOST_BY_POSITION], "tables": tables[:MOST_WORST]}


def _last_pass(facts: Facts, of: str) -> Iterator[tuple[str, str, dict[int, float]]]:
    """(split, metric, position or sample -> value) of the last pass over each split."""
    valid = (line for line in facts.metrics.records if line.get("of") == of and is_place(line.get(of)))
    for split, lines_of_split in grouped(valid, lambda line: str(line.get("split", ""))).items():
        passes = grouped(lines_of_split, lambda line: (line.get("epoch"), line.get("step")))
        measured = (
            (name, line[of], value)
            for line in list(passes.values())[-1]
            for name, value in numbers(line, without=_ABOUT_PARTS).items()
        )
        for name, values in grouped(measured, itemgetter(0)).items():
            yield split, name, {place: value for _, place, value in values}

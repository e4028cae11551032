"""Metrics by position and by sample (`by:` in `task.metrics`): a curve over positions, the worst samples."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.draw.text import number
from hookrun.report.facts import Facts
from hookrun.report.lines import grouped, is_place, numbers
from hookrun.spec.objective import direction_of
from hookrun.store.scores import ABOUT

MOST_FIGURES = 20
MOST_TABLES = 10
MOST_SAMPLES = 10
_ABOUT = {*ABOUT, "position", "sample", "tokens"}


def build(facts: Facts) -> dict[str, Any] | None:
    """Charts by position, and tables of the worst samples; None without either."""
    figures, tables = _by_position(facts)[:MOST_FIGURES], _by_sample(facts)[:MOST_TABLES]
    return {"figures": figures, "tables": tables} if figures or tables else None


def _latest(facts: Facts, of: str) -> dict[str, list[dict[str, Any]]]:
    """Split -> the lines of its last pass that have a valid position or sample."""
    valid = (line for line in facts.metrics.records if line.get("of") == of and is_place(line.get(of)))
    latest = dict[str, list[dict[str, Any]]]()
    for split, lines_of_split in grouped(valid, lambda line: str(line.get("split", ""))).items():
        passes = grouped(lines_of_split, lambda line: (line.get("epoch"), line.get("step")))
        latest[split] = list(passes.values())[-1]
    return latest


def _by_position(facts: Facts) -> list[Figure]:
    """One chart for each metric, a curve for each split."""
    curves = defaultdict[str, list[Series]](list)
    for split, lines_of_split in _latest(facts, "position").items():
        points = defaultdict[str, dict[int, float]](dict)
        for line in lines_of_split:
            for name, value in numbers(line, without=_ABOUT).items():
                points[name][line["position"]] = value
        for name, values in points.items():
            places = sorted(values)
            curves[name].append(Series(split, places, [values[place] for place in places]))
    return [
        lines(f"{name} by position", series, x="position, from the first token", y=name)
        for name, series in curves.items()
        if max(len(each.x) for each in series) > 1
    ]


def _by_sample(facts: Facts) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """For each metric and split a title, and (sample, file and class, value) of the worst samples, worst first.

    Only metrics of which it is known whether small or large is better.
    """
    tables = []
    for split, lines_of_split in _latest(facts, "sample").items():
        values = defaultdict[str, list[tuple[float, int]]](list)
        for line in lines_of_split:
            for name, value in numbers(line, without=_ABOUT).items():
                values[name].append((value, line["sample"]))
        for name, samples in values.items():
            if (direction := direction_of(name)) is None:
                continue
            sign = 1 if direction == "minimize" else -1
            samples.sort(key=lambda pair: math.inf if math.isnan(pair[0]) else sign * pair[0], reverse=True)
            shown = [
                (sample, facts.called.get((split, sample), ""), number(float(value)))
                for value, sample in samples[:MOST_SAMPLES]
            ]
            tables.append((f"{split}: the worst of {len(samples):,} samples by {name}", shown))
    return tables

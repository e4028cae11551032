"""The metrics of a sweep against its keys: curves for one key, a map for two, curves for each key of more."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from hookrun.errors import counted
from hookrun.report.draw.axes import spans_magnitudes
from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import number
from hookrun.report.jobs import JobFacts
from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts

K = TypeVar("K")

MOST_METRICS = 6
MOST_FIGURES = 18
MOST_CELLS = 40
REPEATS = "seed"
"""The key whose values are repetitions of the same experiment."""


def _figures(facts: SweepFacts) -> list[Figure] | None:
    """One figure for each metric; jobs that differ only in their seed are one point with a band."""
    jobs = facts.compared
    measured = {name for job in jobs for name in job.metrics}
    names = [name for name in facts.metrics if name in measured and not name.endswith("/samples")]
    keys = [key for key in facts.varied if key != REPEATS] or facts.varied
    figures = list[Figure]()
    for name in names[:MOST_METRICS]:
        if len(keys) == 2 and _are_few(jobs, keys):
            found = [_map(jobs, keys[0], keys[1], name)]
        else:
            found = [_curve([job for job in jobs if name in job.metrics], key, name) for key in keys]
        figures += [_with_baselines(figure, facts, name) for figure in found]
    return figures[:MOST_FIGURES] or None


def _with_baselines(figure: Figure, facts: SweepFacts, name: str) -> Figure:
    """The figure with a note of the metric's value without hooks."""
    values = [job.metrics[name] for job in facts.baselines if name in job.metrics]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return figure
    said = f"without hooks: {number(float(np.mean(finite)))}"
    if len(finite) > 1:
        said += f", the mean of {counted(len(finite), 'baseline')}"
    return replace(figure, note="; ".join(filter(None, [figure.note, said])))


def _are_few(jobs: Sequence[JobFacts], keys: Sequence[str]) -> bool:
    return all(len({job.overrides.get(key) for job in jobs}) <= MOST_CELLS for key in keys)


def _curve(jobs: Sequence[JobFacts], key: str, name: str) -> Figure:
    """The mean over the jobs with each value, and a band from the minimum to the maximum."""
    by_value = defaultdict[str, list[float]](list)
    for job in jobs:
        by_value[job.overrides.get(key, "–")].append(job.metrics[name])
    finite, lost = _finite(by_value)
    order = sorted(finite, key=_rank)
    numbers = [_number(value) for value in order]
    is_numeric = all(number is not None for number in numbers)
    xs = (
        [number for number in numbers if number is not None]
        if is_numeric
        else list(map(float, range(len(order))))
    )
    means = [float(np.mean(finite[value])) for value in order]
    least, largest = ([reach(finite[value]) for value in order] for reach in (min, max))
    series = [Series(name, xs, means, least, largest, dots=not is_numeric or key == REPEATS)]
    mean = "points" if series[0].dots else "line"
    notes = [f"{mean}: the mean; band: from minimum to maximum"] if _are_several(by_value) else []
    return lines(
        f"{name} against {key}",
        series,
        x=key,
        y=name,
        log=spans_magnitudes(means, 1000),
        log_x=is_numeric and spans_magnitudes(xs, 30),
        labels=None if is_numeric else order,
        note="; ".join([*notes, *lost]),
    )


def _map(jobs: Sequence[JobFacts], across: str, up: str, name: str) -> Figure:
    """The mean over the jobs of each cell; a cell is empty if its jobs do not have the metric."""

    def values(key: str) -> list[str]:
        return sorted({job.overrides.get(key, "–") for job in jobs}, key=_rank)

    columns, rows = values(across), values(up)
    cells = defaultdict[tuple[str, str], list[float]](list)
    for job in jobs:
        if name in job.metrics:
            cells[job.overrides.get(up, "–"), job.overrides.get(across, "–")].append(job.metrics[name])
    finite, lost = _finite(cells)
    matrix = np.full((len(rows), len(columns)), np.nan, dtype=np.float32)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if found := finite.get((row, column)):
                matrix[i, j] = np.mean(found)
    return heat(
        name,
        matrix,
        rows=rows,
        columns=columns,
        x=f"across: {across}; down: {up}",
        note="; ".join([*(["each cell is a mean"] if _are_several(cells) else []), *lost]),
        numbers=len(columns) <= 12,
    )


def _finite(groups: Mapping[K, Sequence[float]]) -> tuple[dict[K, list[float]], list[str]]:
    """The finite values of each group, a NaN if there are none, and a note on the values left out."""
    finite = {key: [value for value in values if math.isfinite(value)] for key, values in groups.items()}
    lost = sum(map(len, groups.values())) - sum(map(len, finite.values()))
    note = [f"left out: {counted(lost, 'job')} whose value is not finite"] if lost else []
    return {key: values or [math.nan] for key, values in finite.items()}, note


def _are_several(groups: Mapping[K, Sequence[float]]) -> bool:
    return max(map(len, groups.values()), default=0) > 1


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _rank(text: str) -> tuple[bool, float, str]:
    """A sort key: numbers by size, then texts."""
    number = _number(text)
    return number is None, number or 0.0, text


SECTION = ReportSection("figures", "Metrics by swept key", _figures, "swept.html")

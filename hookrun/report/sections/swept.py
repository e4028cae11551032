"""The objective of a sweep, and its metrics against its keys: curves for one key or many, a map for two."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hookrun.errors import counted
from hookrun.report.draw.charts import Figure, Series, lines, spans_magnitudes
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import number
from hookrun.report.sweep_facts import JobFacts, SweepFacts, conclusion

K = TypeVar("K")

MOST_METRICS = 6
MOST_FIGURES = 18
MOST_CELLS = 40


def objective(facts: SweepFacts) -> dict[str, Any] | None:
    """The objective as text, how many jobs are done without a finite value, and the metrics of single batches."""
    of_batch = sorted({name for job in facts.jobs for name in job.of_batch})
    said = str(facts.goal) if facts.goal else ""
    if len(facts.goals) > 1:
        said = "not the same for every job: " + "; ".join(sorted(map(str, facts.goals)))
    if not said and not of_batch:
        return None
    without = sum(job.result is not None and job.value is None for job in facts.jobs) if facts.goal else 0
    return {"objective": said, "conclusion": conclusion(facts), "without": without, "of_batch": of_batch}


def figures(facts: SweepFacts) -> list[Figure]:
    """One figure for each metric; jobs of one setting, such as its seeds, are one point with a band."""
    jobs = facts.compared
    measured = {name for job in jobs for name in job.metrics}
    names = [name for name in facts.metrics if name in measured and not name.endswith("/samples")]
    keys = [key for key in facts.varied if key not in facts.averaged] or facts.varied
    is_small = all(len({job.overrides.get(key) for job in jobs}) <= MOST_CELLS for key in keys)
    shown = list[Figure]()
    for name in names[:MOST_METRICS]:
        if len(keys) == 2 and is_small:
            drawn = [_map(jobs, keys[0], keys[1], name)]
        else:
            of_metric = [job for job in jobs if name in job.metrics]
            drawn = [_curve(of_metric, key, name, dots=key in facts.averaged) for key in keys]
        shown += [_with_baselines(figure, facts, name) for figure in drawn]
    return shown[:MOST_FIGURES]


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


def _curve(jobs: Sequence[JobFacts], key: str, name: str, *, dots: bool) -> Figure:
    """The mean over the jobs with each value, and a band from the minimum to the maximum.

    dots: points, also for numbers, which are not in an order that means something
    """
    by_value = defaultdict[str, list[float]](list)
    for job in jobs:
        by_value[job.overrides.get(key, "–")].append(job.metrics[name])
    order = sorted(by_value, key=_rank)
    xs = [_number(value) for value in order]
    is_numeric = all(map(math.isfinite, xs))
    dots = dots or not is_numeric
    finite, notes = _finite(
        by_value, f"{'points' if dots else 'line'}: the mean; band: from minimum to maximum"
    )
    means = [float(np.mean(finite[value])) for value in order]
    least, largest = ([reach(finite[value]) for value in order] for reach in (min, max))
    places = xs if is_numeric else list(map(float, range(len(order))))
    return lines(
        f"{name} against {key}",
        [Series(name, places, means, least, largest, dots=dots)],
        x=key,
        y=name,
        log=spans_magnitudes(means, 1000),
        log_x=is_numeric and spans_magnitudes(xs, 30),
        labels=None if is_numeric else order,
        note="; ".join(notes),
    )


def _map(jobs: Sequence[JobFacts], across: str, up: str, name: str) -> Figure:
    """The mean over the jobs of each cell; a cell is empty if its jobs do not have the metric."""
    columns, rows = (sorted({job.overrides.get(key, "–") for job in jobs}, key=_rank) for key in (across, up))
    cells = defaultdict[tuple[str, str], list[float]](list)
    for job in jobs:
        if name in job.metrics:
            cells[job.overrides.get(up, "–"), job.overrides.get(across, "–")].append(job.metrics[name])
    finite, notes = _finite(cells, "each cell is a mean")
    means = [[np.mean(finite.get((row, column), math.nan)) for column in columns] for row in rows]
    return heat(
        name,
        np.array(means, dtype=np.float32),
        rows=rows,
        columns=columns,
        x=f"across: {across}; down: {up}",
        note="; ".join(notes),
        numbers=len(columns) <= 12,
    )


def _finite(groups: Mapping[K, Sequence[float]], several: str) -> tuple[dict[K, list[float]], list[str]]:
    """The finite values of each group, a NaN if there are none; `several` if a group has more values than one.

    The second note says how many values were left out.
    """
    finite = {key: [value for value in values if math.isfinite(value)] for key, values in groups.items()}
    notes = [several] if max(map(len, groups.values()), default=0) > 1 else []
    if lost := sum(map(len, groups.values())) - sum(map(len, finite.values())):
        notes.append(f"left out: {counted(lost, 'job')} whose value is not finite")
    return {key: values or [math.nan] for key, values in finite.items()}, notes


def _number(text: str) -> float:
    """The text as a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rank(text: str) -> tuple[bool, float, str]:
    """A sort key: numbers by size, then texts."""
    number = _number(text)
    return not math.isfinite(number), number if math.isfinite(number) else 0.0, text

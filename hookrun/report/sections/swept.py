"""The objective of a sweep, and its metrics against its keys: curves for one key or many, a map for two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from markupsafe import Markup

from hookrun.errors import counted
from hookrun.report.draw.charts import Figure, Series, is_geometric, lines, spans_magnitudes
from hookrun.report.draw.pictures import HeatMap, matrix
from hookrun.report.draw.text import by_number, number, number_of, token_name
from hookrun.report.lines import sampled
from hookrun.report.sweep_facts import JobFacts, SweepFacts, conclusion
from hookrun.store.format import SAMPLES, TOKENS
from hookrun.store.objective import is_loss
from hookrun.store.records import SampleLine, TokenLine, grouped

K = TypeVar("K")

MOST_METRICS = 6
MOST_FIGURES = 18
MOST_CELLS = 40
_MOST_SAMPLES = 2**17
"""Bytes read of a job's samples.jsonl."""


def objective(facts: SweepFacts) -> dict[str, Any] | None:
    """The objective as text, how many jobs are done without a finite value, and the metrics of single batches."""
    of_batch = sorted({name for job in facts.jobs for name in job.of_batch})
    said = "; ".join(sorted(map(str, facts.goals)))
    if not said and not of_batch:
        return None
    without = sum(job.result is not None and job.value is None for job in facts.jobs) if facts.goal else 0
    return {
        "objective": said if len(facts.goals) < 2 else f"not the same for every job: {said}",
        "conclusion": conclusion(facts),
        "without": without,
        "of_batch": of_batch,
    }


def figures(facts: SweepFacts, *, are_few: bool) -> list[Figure]:
    """One figure for each metric, that of the goal first; jobs of one setting, such as its seeds, are one point.

    are_few: whether those of a sweep over one or two keys are wanted, which are its result, or of one over more keys,
             which are beside its table; none for the other kind of sweep
    """
    # if all are averaged over, there is nothing else to show
    keys = [key for key in facts.varied if key not in facts.averaged] or facts.varied
    if (len(keys) <= 2) != are_few:
        return []
    jobs = facts.compared
    measured = {name for job in jobs for name in job.metrics}
    names = sorted(
        (name for name in facts.metrics if name in measured and not name.endswith("/samples")),
        key=lambda name: facts.goal is None or name != facts.goal.metric,
    )
    is_small = all(len({job.overrides.get(key) for job in jobs}) <= MOST_CELLS for key in keys)
    shown = list[Figure]()
    for name in names[:MOST_METRICS]:
        if len(keys) == 2 and is_small:
            drawn = [_map(facts, keys, name)]
        else:
            of_metric = [job for job in jobs if name in job.metrics]
            drawn = [_curve(of_metric, key, name, dots=key in facts.averaged) for key in keys]
        shown += [_with_baselines(figure, facts, name) for figure in drawn]
    return shown[:MOST_FIGURES]


def _with_baselines(figure: Figure, facts: SweepFacts, name: str) -> Figure:
    """The figure with a note of the metric's value without hooks; not if other swept keys change that too."""
    others = [key for key in facts.varied if not key.startswith("hooks.") and key not in facts.averaged]
    differ = len({tuple(job.overrides.get(key) for key in others) for job in facts.baselines}) > 1
    count = sum(math.isfinite(job.metrics.get(name, math.nan)) for job in facts.baselines)
    if differ or not count:
        return figure
    mean_of = f", the mean of {counted(count, 'baseline')}" if count > 1 else ""
    said = f"without hooks: {number(facts.level(name))}{mean_of}"
    return replace(figure, note="; ".join(filter(None, [figure.note, said])))


def _curve(jobs: Sequence[JobFacts], key: str, name: str, *, dots: bool) -> Figure:
    """The mean over the jobs with each value, and a band from the minimum to the maximum.

    dots: points, also for numbers, which are not in an order that means something
    """
    by_value = {
        value: [job.metrics[name] for job in of_value]
        for value, of_value in grouped(jobs, lambda job: job.overrides.get(key, "–")).items()
    }
    order = sorted(by_value, key=by_number)
    xs = [number_of(value) for value in order]
    # a logarithmic axis has no place for 0: the values are then at equal distances
    is_numeric = all(map(math.isfinite, xs)) and not (xs[0] == 0 and is_geometric(xs[1:]))
    dots = dots or not is_numeric
    finite, notes = _finite(
        by_value, f"{'points' if dots else 'line'}: the mean; band: from minimum to maximum"
    )
    means, least, largest = ([float(of(finite[value])) for value in order] for of in (np.mean, min, max))
    places = xs if is_numeric else list(map(float, range(len(order))))
    return lines(
        f"{name} against {key}",
        [Series(name, places, means, least, largest, dots=dots)],
        x=key,
        y=name,
        log=spans_magnitudes(means, 1000),
        log_x=is_numeric and is_geometric(xs),
        labels=None if is_numeric else order,
        note="; ".join(notes),
    )


def _map(facts: SweepFacts, keys: Sequence[str], name: str) -> Figure:
    """The mean over the jobs of each cell, which links to the first of them; also of the differences to the baselines.

    A layer goes up, a head or a position across; else the first key goes across and the second down.
    """
    across, down = sorted(keys, key=_direction)
    columns, rows = (
        sorted({job.overrides.get(key, "–") for job in facts.compared}, key=by_number)
        for key in (across, down)
    )
    if is_layer := _direction(down) > 0:
        rows.reverse()
    cells = grouped(
        facts.compared, lambda job: (job.overrides.get(down, "–"), job.overrides.get(across, "–"))
    )
    heads = columns
    if _POSITION.search(across):
        columns.sort(key=lambda position: position.startswith("-"))  # counted from the end
        heads = _with_tokens(facts, columns)
    links = [
        [next((job.link for job in cells.get((row, column), ()) if job.has_report), "") for column in columns]
        for row in rows
    ]

    def view(measured: Callable[[JobFacts], float | None], centre: float | None, several: str) -> Figure:
        finite, notes = _finite(
            {
                cell: [value for job in jobs if (value := measured(job)) is not None]
                for cell, jobs in cells.items()
            },
            several,
        )
        means = matrix({cell: np.mean(values) for cell, values in finite.items()}, rows, columns)
        if centre is None and is_loss(name) and np.isfinite(means).any():
            centre = float(means[np.isfinite(means)].min())  # no colour of the scale is green
        return HeatMap(
            name,
            means,
            rows=rows,
            columns=heads,
            x=f"across: {across}; {'up' if is_layer else 'down'}: {down}",
            note="; ".join(notes),
            numbers=len(columns) <= 12,
            centre=centre,
            links=links,
        ).figure()

    value = view(lambda job: job.metrics.get(name), facts.level(name), "each cell is a mean")
    if not facts.baselines:
        return value
    difference = view(lambda job: facts.difference(job, name), 0.0, "")
    picture = Markup(
        '<div class="views"><label><input type="radio" name="{0}" checked>value</label>'
        '<label><input type="radio" name="{0}">difference to the baseline</label>'
        "<div>{1}{2}</div><div>{3}{4}</div></div>"
    ).format(f"view of {name}", value.scale, value.picture, difference.scale, difference.picture)
    return replace(value, picture=picture, scale=None)


_UP = re.compile(r"(?<![a-z])(layers?|blocks?|depth|select)(?![a-z])")
_POSITION = re.compile(r"(?<![a-z])(positions?|tokens)(?![a-z])")
_HEAD = re.compile(r"(?<![a-z])heads?(?![a-z])")


def _direction(key: str) -> int:
    """1 for a key that names layers, -1 for one that names heads or positions, 0 for others."""
    return bool(_UP.search(key)) - bool(_POSITION.search(key) or _HEAD.search(key))


def _with_tokens(facts: SweepFacts, positions: Sequence[str]) -> list[str]:
    """The positions, each with its token if that is the same in all samples of all jobs."""
    folders = [facts.folder / job.name for job in facts.compared]
    files = [
        sampled(folder / SAMPLES, SampleLine, limit=_MOST_SAMPLES, from_start=True) for folder in folders
    ]
    if any(file.is_sample or not file.records for file in files):
        return list(positions)
    sequences = {tuple(line.get("tokens") or ()) for file in files for line in file.records}
    texts = {line["token"]: line["text"] for line in sampled(folders[0] / TOKENS, TokenLine).records}
    shortest = min(map(len, sequences))

    def named(position: str) -> str:
        at = int(position) if re.fullmatch(r"-?\d{1,9}", position) else shortest
        tokens = {sequence[at] for sequence in sequences} if -shortest <= at < shortest else set()
        names = [token_name(texts.get(token, ""), token) for token in tokens]
        return f"{position} {names[0]}" if len(names) == 1 else position

    return list(map(named, positions))


def _finite(groups: Mapping[K, Sequence[float]], several: str) -> tuple[dict[K, list[float]], list[str]]:
    """The finite values of each group, a NaN if there are none; `several` if a group has more values than one.

    The second note says how many values were left out.
    """
    finite = {key: [value for value in values if math.isfinite(value)] for key, values in groups.items()}
    notes = [several] if max(map(len, groups.values()), default=0) > 1 else []
    if lost := sum(map(len, groups.values())) - sum(map(len, finite.values())):
        notes.append(f"left out: {counted(lost, 'job')} whose value is not finite")
    return {key: values or [math.nan] for key, values in finite.items()}, notes

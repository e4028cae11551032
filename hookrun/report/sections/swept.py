"""The objective of a sweep, and its metrics against its keys: curves for one key or many, a map for two."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hookrun.errors import counted
from hookrun.report.curves import MOST_OPEN_METRICS, fold
from hookrun.report.draw.charts import Figure, Series, is_geometric, lines, spans_magnitudes
from hookrun.report.draw.pictures import HeatMap, matrix
from hookrun.report.draw.rendering import rendered
from hookrun.report.draw.text import by_number, number, number_of, token_name
from hookrun.report.lines import sampled
from hookrun.report.sweep_facts import JobData, SweepData, conclusion
from hookrun.store.format import SAMPLES, TOKENS
from hookrun.store.objective import is_loss
from hookrun.store.records import SampleLine, TokenLine, grouped

K = TypeVar("K")

Cell = tuple[str, str]
"""The values of the key that goes down, and of the one that goes across."""

MOST_METRICS = 6
MOST_FIGURES = 18
MOST_CELLS = 40
_MOST_SAMPLES = 2**17
"""Bytes read of a job's samples.jsonl."""


def objective(facts: SweepData) -> dict[str, Any] | None:
    """The objective as text, how many jobs are done without a finite value, and the metrics of single batches."""
    of_batch = sorted(set().union(*(job.of_batch for job in facts.jobs)))
    goals = "; ".join(sorted(map(str, facts.goals)))
    if not goals and not of_batch:
        return None
    if len(facts.goals) > 1:
        goals = f"not the same for every job: {goals}"
    without = 0
    if facts.goal is not None:
        without = sum(job.result is not None and job.value is None for job in facts.jobs)
    return {
        "objective": goals,
        "conclusion": conclusion(facts),
        "without": without,
        "of_batch": of_batch,
    }


def figures(facts: SweepData, *, are_few: bool) -> list[Figure]:
    """One figure for each metric, that of the goal first; jobs of one setting, such as its seeds, are one point.

    are_few: whether those of a sweep over one or two keys are wanted, which are its result, or of one over more keys,
             which are beside its table; none for the other kind of sweep
    """
    # if all are averaged over, there is nothing else to show
    keys = [key for key in facts.varied if key not in facts.averaged] or facts.varied
    if (len(keys) <= 2) != are_few:
        return []
    measured = set().union(*(job.metrics for job in facts.compared))
    names = [name for name in facts.metrics if name in measured and not name.endswith("/samples")]
    if facts.goal is not None and facts.goal.metric in names:
        names.remove(facts.goal.metric)
        names.insert(0, facts.goal.metric)
    is_map = len(keys) == 2 and all(len(facts.values_of(key)) <= MOST_CELLS for key in keys)
    drawn: list[Figure] = []
    for name in names[:MOST_METRICS]:
        if is_map:
            drawn.append(_with_baselines(_Map(facts, keys).figure(name), facts, name))
            continue
        jobs = [job for job in facts.compared if name in job.metrics]
        for key in keys:
            curve = _curve(jobs, key, name, dots=key in facts.averaged)
            drawn.append(_with_baselines(curve, facts, name))
    return fold(drawn[:MOST_FIGURES], MOST_OPEN_METRICS)


def _with_baselines(figure: Figure, facts: SweepData, name: str) -> Figure:
    """The figure with a note of the metric's value without hooks; not if other swept keys change that too."""
    others = [key for key in facts.varied if not key.startswith("hooks.") and key not in facts.averaged]
    settings = {tuple(job.overrides.get(key) for key in others) for job in facts.baselines}
    count = sum(math.isfinite(job.metrics.get(name, math.nan)) for job in facts.baselines)
    if len(settings) > 1 or not count:
        return figure
    note = f"without hooks: {number(facts.level(name))}"
    if count > 1:
        note += f", the mean of {counted(count, 'baseline')}"
    if figure.note:
        note = f"{figure.note}; {note}"
    return replace(figure, note=note)


def _curve(jobs: Sequence[JobData], key: str, name: str, *, dots: bool) -> Figure:
    """The mean over the jobs with each value, and a band from the minimum to the maximum.

    dots: points, also for numbers, which are not in an order that means something
    """
    by_value: dict[str, list[float]] = {}
    for job in jobs:
        by_value.setdefault(job.given(key), []).append(job.metrics[name])
    order = sorted(by_value, key=by_number)
    labels: list[str] | None = None
    places = [number_of(value) for value in order]
    # a logarithmic axis has no place for 0: the values are then at equal distances
    if not all(map(math.isfinite, places)) or (places[0] == 0 and is_geometric(places[1:])):
        labels = order
        places = [float(place) for place in range(len(order))]
        dots = True
    kind = "points" if dots else "line"
    finite, notes = _finite(by_value, f"{kind}: the mean; band: from minimum to maximum")
    values = [finite[value] for value in order]
    means = [float(np.mean(of_value)) for of_value in values]
    least = list(map(min, values))
    largest = list(map(max, values))
    return lines(
        f"{name} against {key}",
        [Series(name, places, means, least, largest, dots=dots)],
        x=key,
        y=name,
        log=spans_magnitudes(means, 1000),
        log_x=labels is None and is_geometric(places),
        labels=labels,
        note="; ".join(notes),
    )


class _Map:
    """The jobs of a sweep over two keys as the cells of a map.

    A layer goes up, a head or a position across; else the first key goes across and the second down.
    """

    def __init__(self, facts: SweepData, keys: Sequence[str]) -> None:
        self.facts = facts
        across, down = sorted(keys, key=_direction)
        self.columns = sorted(facts.values_of(across), key=by_number)
        self.rows = sorted(facts.values_of(down), key=by_number)
        self.axes = f"across: {across}; down: {down}"
        if _direction(down) > 0:
            self.rows.reverse()
            self.axes = f"across: {across}; up: {down}"
        self.heads = self.columns
        if _POSITION.search(across):
            self.columns.sort(key=lambda position: position.startswith("-"))  # counted from the end
            self.heads = _with_tokens(facts, self.columns)
        self.jobs = grouped(facts.compared, lambda job: (job.given(down), job.given(across)))

    def figure(self, name: str) -> Figure:
        """The mean of a metric in each cell; also of the differences to the baselines, if there are any."""
        values = {cell: [job.metrics.get(name) for job in jobs] for cell, jobs in self.jobs.items()}
        value = self._heat(name, values, self.facts.level(name), "each cell is a mean")
        if not self.facts.baselines:
            return value
        differences = {
            cell: [self.facts.difference(job, name) for job in jobs] for cell, jobs in self.jobs.items()
        }
        difference = self._heat(name, differences, 0.0, "")
        picture = rendered("views.html", name=f"view of {name}", value=value, difference=difference)
        return replace(value, picture=picture, scale=None)

    def _heat(
        self, name: str, cells: Mapping[Cell, list[float | None]], centre: float | None, several: str
    ) -> Figure:
        measured = {cell: [value for value in values if value is not None] for cell, values in cells.items()}
        finite, notes = _finite(measured, several)
        means = matrix({cell: np.mean(values) for cell, values in finite.items()}, self.rows, self.columns)
        if centre is None and is_loss(name) and np.isfinite(means).any():
            centre = float(means[np.isfinite(means)].min())  # no colour of the scale is green
        return HeatMap(
            name,
            means,
            rows=self.rows,
            columns=self.heads,
            x=self.axes,
            note="; ".join(notes),
            numbers=len(self.columns) <= 12,
            centre=centre,
            links=[[self._link((row, column)) for column in self.columns] for row in self.rows],
        ).figure()

    def _link(self, cell: Cell) -> str:
        """The address of the first page of a job of the cell; "" if there is none."""
        for job in self.jobs.get(cell, ()):
            if job.has_report:
                return job.link
        return ""


_UP = re.compile(r"(?<![a-z])(layers?|blocks?|depth|select)(?![a-z])")
_POSITION = re.compile(r"(?<![a-z])(positions?|tokens)(?![a-z])")
_HEAD = re.compile(r"(?<![a-z])heads?(?![a-z])")


def _direction(key: str) -> int:
    """1 for a key that names layers, -1 for one that names heads or positions, 0 for others."""
    return bool(_UP.search(key)) - bool(_POSITION.search(key) or _HEAD.search(key))


def _with_tokens(facts: SweepData, positions: Sequence[str]) -> list[str]:
    """The positions, each with its token if that is the same in all samples of all jobs."""
    sequences = set[tuple[int, ...]]()
    for job in facts.compared:
        file = sampled(facts.folder / job.name / SAMPLES, SampleLine, limit=_MOST_SAMPLES, from_start=True)
        if file.is_sample or not file.records:
            return list(positions)
        sequences.update(tuple(line.get("tokens") or ()) for line in file.records)
    tokens = sampled(facts.folder / facts.compared[0].name / TOKENS, TokenLine).records
    texts = {line["token"]: line["text"] for line in tokens}
    named: list[str] = []
    for position in positions:
        token = _token_at(position, sequences)
        if token is not None:
            position += f" {token_name(texts.get(token, ''), token)}"
        named.append(position)
    return named


def _token_at(position: str, sequences: Collection[Sequence[int]]) -> int | None:
    """The token at a position of all sequences; None if it is not the same, or not in all of them."""
    if not re.fullmatch(r"-?\d{1,9}", position):
        return None
    at = int(position)
    shortest = min(map(len, sequences))
    if not -shortest <= at < shortest:
        return None
    tokens = {sequence[at] for sequence in sequences}
    if len(tokens) > 1:
        return None
    return tokens.pop()


def _finite(groups: Mapping[K, Sequence[float]], several: str) -> tuple[dict[K, list[float]], list[str]]:
    """The finite values of each group, a NaN if there are none; `several` if a group has more values than one.

    The second note says how many values were left out.
    """
    finite: dict[K, list[float]] = {}
    lost = 0
    for key, values in groups.items():
        kept = list(filter(math.isfinite, values))
        lost += len(values) - len(kept)
        finite[key] = kept or [math.nan]
    notes: list[str] = []
    if max(map(len, groups.values()), default=0) > 1:
        notes.append(several)
    if lost:
        notes.append(f"left out: {counted(lost, 'job')} whose value is not finite")
    return finite, notes

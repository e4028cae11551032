"""Metrics by position and by sample (`by:` in `task.metrics`): a curve over positions, the worst samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.draw.text import number
from hookrun.report.facts import Facts
from hookrun.report.lines import is_place, numbers
from hookrun.report.section import ReportSection
from hookrun.spec.objective import direction_of
from hookrun.store.scores import ABOUT, Line

MOST_FIGURES = 20
MOST_TABLES = 10
MOST_SAMPLES = 10
_ABOUT = {*ABOUT, "position", "sample", "tokens"}


@dataclass(frozen=True)
class WorstSamples:
    """Rows (sample, file and class, value) of the samples of a split with the worst values of a metric, worst first."""

    title: str
    rows: Sequence[tuple[int, str, str]]


@dataclass(frozen=True)
class PartsOfPasses:
    """The curves and the tables."""

    figures: Sequence[Figure]
    tables: Sequence[WorstSamples]


def _parts(facts: Facts) -> PartsOfPasses | None:
    figures, tables = _by_position(facts)[:MOST_FIGURES], _by_sample(facts)[:MOST_TABLES]
    return PartsOfPasses(figures, tables) if figures or tables else None


def _latest(facts: Facts, of: str) -> dict[str, list[Line]]:
    """Split -> the lines of its last pass that have a valid position or sample."""
    found = defaultdict[str, dict[tuple[object, object], list[Line]]](dict)
    for line in facts.metrics.records:
        if line.get("of") == of and is_place(line.get(of)):
            found[str(line.get("split", ""))].setdefault((line.get("epoch"), line.get("step")), []).append(
                line
            )
    return {split: list(passes.values())[-1] for split, passes in found.items()}


def _by_position(facts: Facts) -> list[Figure]:
    """One chart for each metric, a curve for each split."""
    curves = defaultdict[str, list[Series]](list)
    for split, found in _latest(facts, "position").items():
        points = defaultdict[str, dict[int, float]](dict)
        for line in found:
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


def _by_sample(facts: Facts) -> list[WorstSamples]:
    """A table for each metric and split, if it is known whether small or large is better."""
    tables = []
    for split, found in _latest(facts, "sample").items():
        names = dict.fromkeys(name for line in found for name in numbers(line, without=_ABOUT))
        for name in names:
            if (direction := direction_of(name)) is None:
                continue
            rows = [
                (line["sample"], float(line[name])) for line in found if name in numbers(line, without=_ABOUT)
            ]
            worst = sorted(
                rows, key=lambda row: _badness(row[1], smaller=direction == "minimize"), reverse=True
            )
            shown = [
                (sample, facts.called.get((split, sample), ""), number(value))
                for sample, value in worst[:MOST_SAMPLES]
            ]
            tables.append(WorstSamples(f"{split}: the worst of {len(rows):,} samples by {name}", shown))
    return tables


def _badness(value: float, *, smaller: bool) -> float:
    """A sort key: larger is worse; NaN is the worst."""
    return math.inf if math.isnan(value) else value if smaller else -value


SECTION = ReportSection("parts", "By position and sample", _parts, "parts_of_passes.html")

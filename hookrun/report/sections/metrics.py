"""The curves of metrics.jsonl, and the latest value of each metric, which stands at the top of the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.facts import Facts
from hookrun.report.lines import numbers
from hookrun.report.section import ReportSection

_ABOUT = frozenset({"split", "epoch", "step", "module", "other", "score"})
"""Keys of a line that say what it is about."""

MOST_FIGURES = 60
MOST_CURVES = 16
MOST_LATEST = 100

_PLACES = {"loss": 0, "accuracy": 1, "lr": 2}


@dataclass(frozen=True)
class LatestValue:
    """The latest and the best value of a metric on a split."""

    split: str
    name: str
    last: float
    best: float


def _curves(facts: Facts) -> list[Figure] | None:
    """One chart for each metric with more than one value, a curve for each split; none for a constant lr."""
    by_name = defaultdict[str, dict[str, list[tuple[float, float]]]](dict)
    for split, step, values in _measured(facts):
        for name, value in values.items():
            by_name[name].setdefault(split, []).append((step, value))
    figures = []
    for name in sorted(by_name, key=lambda name: (_PLACES.get(name, 9), name)):
        series = [
            Series(split, [x for x, _ in points], [y for _, y in points])
            for split, points in by_name[name].items()
        ]
        is_constant = name == "lr" and len({y for each in series for y in each.y}) == 1
        if max(len(each.x) for each in series) > 1 and not is_constant:
            figures.append(lines(name, series[:MOST_CURVES], x="step", y=name))
    return figures[:MOST_FIGURES] or None


def latest(facts: Facts) -> list[LatestValue]:
    """The latest and the best of each metric on each split; of losses the best is the least."""
    found = dict[tuple[str, str], LatestValue]()
    for split, _, values in _measured(facts):
        for name, value in values.items():
            key = (split, name)
            before = found[key].best if key in found else value
            better = min(value, before) if "loss" in name else max(value, before)
            found[key] = LatestValue(*key, value, before if value != value else better)
    return [each for each in found.values() if each.name != "lr"][:MOST_LATEST]


def _measured(facts: Facts) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Split, step and metrics of the lines that were measured at a step; those of analyses name a module instead."""
    for line in facts.metrics.records:
        if isinstance(line.get("step"), int):
            yield str(line.get("split", "")), line["step"], numbers(line, without=_ABOUT)


SECTION = ReportSection("metrics", "Metrics", _curves, "metrics.html")

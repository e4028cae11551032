"""The curves of metrics.jsonl, and the latest value of each metric, which is shown at the top of the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hookrun.report.draw.charts import Figure, Series, lines
from hookrun.report.facts import Facts
from hookrun.report.lines import numbers
from hookrun.spec.objective import is_loss
from hookrun.store.scores import ABOUT, Line, is_batch, is_part

MOST_FIGURES = 60
MOST_CURVES = 16
MOST_LATEST = 100

_PLACES = {"loss": 0, "accuracy": 1, "lr": 2}


def build(facts: Facts) -> list[Figure] | None:
    """One chart for each metric with more than one value, with a curve for each split; no chart of a constant lr.

    Single training batches are a thin curve, epoch means have points.
    """
    by_name = defaultdict[str, dict[tuple[str, bool], list[tuple[float, float]]]](dict)
    for line, split, step, values in _measured(facts):
        for name, value in values.items():
            by_name[name].setdefault((split, is_batch(line)), []).append((step, value))
    figures = []
    for name in sorted(by_name, key=lambda name: (_PLACES.get(name, 9), name)):
        thin_too = any(not single for _, single in by_name[name])
        series = [
            Series(
                f"{split}, single batches" if single and thin_too else split,
                [x for x, _ in points],
                [y for _, y in points],
                thin=single and thin_too,
            )
            for (split, single), points in by_name[name].items()
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
    values_of = dict[tuple[str, str], dict[str, Any]]()
    lines = list(_measured(facts))
    with_means = {(split, name) for line, split, _, values in lines if not is_batch(line) for name in values}
    for line, split, _, values in lines:
        for name, value in values.items():
            key = (split, name)
            if name == "lr" or (is_batch(line) and key in with_means):
                continue
            best = values_of[key]["best"] if key in values_of else value
            if value == value:
                best = min(value, best) if is_loss(name) else max(value, best)
            values_of[key] = {
                "split": split,
                "name": name,
                "last": value,
                "best": best,
                "of_batch": is_batch(line),
                "total": values.get("samples") if name == "changed" else None,
            }
    return list(values_of.values())[:MOST_LATEST]


def _measured(facts: Facts) -> Iterator[tuple[Line, str, int, dict[str, float]]]:
    """(line, split, step, metrics) of lines with a step, which lines of analyses do not have."""
    for line in facts.metrics.records:
        if isinstance(line.get("step"), int) and not is_part(line):
            yield line, str(line.get("split", "")), line["step"], numbers(line, without=ABOUT)

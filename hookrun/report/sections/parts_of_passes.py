"""Metrics by position and by sample (`by:` in `task.metrics`): a curve over positions, the worst samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hookrun.report.draw.charts import Series, lines
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
    """Charts by position, and tables of the worst samples; None without either.

    tables: for each metric and split, of those of which it is known whether small or large is better, a title, and
            (sample, file and class, value) of the worst samples, worst first
    """
    curves = defaultdict[str, list[Series]](list)
    for split, name, values in _latest(facts, "position"):
        places = sorted(values)
        curves[name].append(Series(split, places, [values[place] for place in places]))
    figures = [
        lines(f"{name} by position", series, x="position, from the first token", y=name)
        for name, series in curves.items()
        if max(len(each.x) for each in series) > 1
    ]
    tables = list[tuple[str, list[tuple[int, str, str]]]]()
    for split, name, values in _latest(facts, "sample"):
        if (direction := direction_of(name)) is None:
            continue
        sign = 1 if direction == "minimize" else -1
        known = {sample: math.inf if math.isnan(value) else sign * value for sample, value in values.items()}
        worst = sorted(values, key=known.__getitem__, reverse=True)[:MOST_SAMPLES]
        rows = [(each, facts.called.get((split, each), ""), number(float(values[each]))) for each in worst]
        tables.append((f"{split}: the worst of {len(values):,} samples by {name}", rows))
    if not figures and not tables:
        return None
    return {"figures": figures[:MOST_FIGURES], "tables": tables[:MOST_TABLES]}


def _latest(facts: Facts, of: str) -> Iterator[tuple[str, str, dict[int, float]]]:
    """(split, metric, position or sample -> value) of the last pass over each split."""
    valid = (line for line in facts.metrics.records if line.get("of") == of and is_place(line.get(of)))
    for split, lines_of_split in grouped(valid, lambda line: str(line.get("split", ""))).items():
        passes = grouped(lines_of_split, lambda line: (line.get("epoch"), line.get("step")))
        metrics = defaultdict[str, dict[int, float]](dict)
        for line in list(passes.values())[-1]:
            for name, value in numbers(line, without=_ABOUT).items():
                metrics[name][line[of]] = value
        yield from ((split, name, values) for name, values in metrics.items())

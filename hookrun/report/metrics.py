"""The curves of metrics.jsonl, and the tables of the tasks that judge captures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from hookrun.report.draw.charts import Figure, Series, bars, lines
from hookrun.report.draw.text import module_name
from hookrun.report.facts import Facts

WHERE = frozenset({"split", "epoch", "step", "module", "other", "score"})
"""Keys of a line that say what it is about."""

MOST_FIGURES = 60
MOST_CURVES = 16
MOST_LATEST = 100
MOST_MODULES = 400

_PROBE = {"module", "features", "samples", "train_accuracy", "accuracy", "chance"}

Line = dict[str, Any]


@dataclass(frozen=True)
class Last:
    """The latest and the best value of a metric on a split."""

    split: str
    name: str
    last: float
    best: float


def curves(facts: Facts) -> list[Figure]:
    """One chart for each metric with more than one value, a curve for each split; none for a constant lr."""
    by_name = defaultdict[str, dict[str, list[tuple[float, float]]]](dict)
    for line in _measured(facts):
        for name, value in _numbers(line).items():
            by_name[name].setdefault(str(line.get("split", "")), []).append((line["step"], value))
    figures = []
    for name in sorted(by_name, key=lambda name: (_PLACES.get(name, 9), name)):
        series = [
            Series(split, [x for x, _ in points], [y for _, y in points])
            for split, points in by_name[name].items()
        ]
        is_constant = name == "lr" and len({y for each in series for y in each.y}) == 1
        if max(len(each.x) for each in series) > 1 and not is_constant:
            figures.append(lines(name, series[:MOST_CURVES], x="step", y=name))
    return figures[:MOST_FIGURES]


_PLACES = {"loss": 0, "accuracy": 1, "lr": 2}


def latest(facts: Facts) -> list[Last]:
    """The latest and the best of each metric on each split; of losses the best is the least."""
    found = dict[tuple[str, str], Last]()
    for line in _measured(facts):
        for name, value in _numbers(line).items():
            key = (str(line.get("split", "")), name)
            before = found[key].best if key in found else value
            better = min(value, before) if "loss" in name else max(value, before)
            found[key] = Last(*key, value, before if value != value else better)
    return [each for each in found.values() if each.name != "lr"][:MOST_LATEST]


def probes(facts: Facts) -> list[Line]:
    """The lines of task=probe, one for each module."""
    found = [line for line in facts.metrics.records if line.get("split") == "probe" and line.keys() >= _PROBE]
    return [line for line in found if isinstance(line["accuracy"], int | float)][:MOST_MODULES]


def probe_figure(found: list[Line]) -> Figure:
    """The score of each module's probe."""
    names = [module_name(str(line["module"])) for line in found]
    score = str(found[0].get("score", "accuracy"))
    chance = found[0].get("chance")
    chance = float(chance) if isinstance(chance, float) else None
    note = f"dashed: by chance, {chance:.3f}" if chance is not None else ""
    values = [float(line["accuracy"]) for line in found]
    return bars(
        f"{score} on samples not fitted on", values, x="module", y=score, names=names, note=note, mark=chance
    )


def similarity(facts: Facts) -> Figure | None:
    """The matrix of task=similarity."""
    import numpy as np

    from hookrun.report.draw.pictures import heat

    pairs = [line for line in facts.metrics.records if line.get("split") == "similarity"]
    lines = [line for line in pairs if isinstance(line.get("cka"), int | float)]
    if not lines:
        return None
    names = list(dict.fromkeys(str(line.get("module")) for line in lines))[:MOST_MODULES]
    place = {name: n for n, name in enumerate(names)}
    values = np.full((len(names), len(names)), np.nan, dtype=np.float32)
    for line in lines:
        row, column = (place.get(str(line.get(key))) for key in ("module", "other"))
        if row is not None and column is not None:
            values[row, column] = np.clip(line["cka"], -1e30, 1e30)
    shown = [module_name(name) for name in names]
    return heat(
        "linear CKA", values, rows=shown, columns=shown, x="module", numbers=len(names) <= 12, limits=(0, 1)
    )


def _measured(facts: Facts) -> list[Line]:
    return [
        line
        for line in facts.metrics.records
        if line.get("split") not in ("probe", "similarity") and isinstance(line.get("step"), int)
    ]


def _numbers(line: Line) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in WHERE and isinstance(value, int | float) and not isinstance(value, bool)
    }

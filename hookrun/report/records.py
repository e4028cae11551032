"""What hooks recorded: statistics over steps, gradient norms by layer, checks that tripped, lines that were printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hookrun.report.draw.axes import spans_magnitudes
from hookrun.report.draw.charts import COLOURS, Figure, Series, lines
from hookrun.report.draw.pictures import heat
from hookrun.report.draw.text import module_name, number, one_line
from hookrun.report.facts import GRADIENT_HOOKS, Facts
from hookrun.runtime.site import verdict

CONTEXT = frozenset(
    {
        "hook",
        "module",
        "path",
        "action",
        "mode",
        "epoch",
        "step",
        "call",
        "ok",
        "message",
        "policy",
        "least",
        "largest",
    }
)
MOST_CHARTS = 8
MOST_MODES = 4
MOST_ROWS = 200
MOST_COLUMNS = 200
MOST_PRINTED = 60
MOST_WORDS = 400

Record = Mapping[str, Any]
Points = dict[str, tuple[list[float], list[float]]]  # name -> steps, values


@dataclass(frozen=True)
class Trip:
    """A check at one module: its first failure, and how many there were."""

    hook: str
    module: str
    epoch: int
    step: int
    mode: str
    message: str
    policy: str
    times: int


def trips(facts: Facts) -> list[Trip]:
    """Checks that found what they must not find, the first failure first."""
    found = dict[tuple[str, str], Trip]()
    for record in facts.stats.records:
        if record.get("action") != "check" or record.get("ok") is not False:
            continue
        key = (str(record["hook"]), f"{record['module']}{record.get('path', '')}")
        if key in found:
            found[key] = replace(found[key], times=found[key].times + 1)
        else:
            found[key] = Trip(
                *key,
                record["epoch"],
                record["step"],
                record["mode"],
                _message(record),
                str(record.get("policy", "")),
                1,
            )
    return list(found.values())


def _message(record: Record) -> str:
    """What a check required, and what it found where the record says that."""
    found = all(record.get(key) is not None for key in ("least", "largest", "message"))
    return verdict(record) if found else str(record.get("message") or "")


def spent(facts: Facts) -> list[str]:
    """What to know of hooks whose `max_bytes` were used up."""
    return [
        f"{record['hook']} captured nothing after epoch {record['epoch']}, step {record['step']} "
        f"({record['mode']} mode): its max_bytes of {number(record['spent'])} were used up"
        for record in facts.stats.records
        if record["action"] == "capture" and isinstance(record.get("spent"), int)
    ]


def printed(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Where and what of the first lines of `print` hooks."""
    said = []
    for record in records:
        if record.get("action") == "print":
            words = "  ".join(f"{key}={_short(value)}" for key, value in record.items() if key not in CONTEXT)
            at = f"{module_name(str(record['module']))} {one_line(str(record.get('path', '')))}".strip()
            said.append((f"step {record['step']}  {at}", words[:MOST_WORDS]))
            if len(said) == MOST_PRINTED:
                break
    return said


def statistics(facts: Facts, hook: str, records: Sequence[Record]) -> list[Figure]:
    """A chart for each statistic that a hook took; gradient norms by layer first, as a map."""
    measured = [record for record in records if record.get("action") == "stats"]
    modes = list(dict.fromkeys(str(record["mode"]) for record in measured))[:MOST_MODES]
    places = facts.places(hook)
    is_gradient = facts.planned.get(hook, {}).get("hook") in GRADIENT_HOOKS
    figures = list[Figure]()
    for mode in modes:
        of_mode = [record for record in measured if record["mode"] == mode]
        every = dict.fromkeys(key for record in of_mode for key in record if key not in CONTEXT)
        names = list(every)[: 2 * MOST_CHARTS]
        where = f", {mode} mode" if len(modes) > 1 else ""
        for name in sorted(names, key=lambda name: name != "norm"):
            points, unit = _points(of_mode, name, places)
            title = f"gradient norm{where}" if is_gradient and name == "norm" else f"{name}{where}"
            if any(points.values()):
                figures += over_steps(title, points, unit, name, by_layer=is_gradient and name == "norm")
    return figures[: 2 * MOST_CHARTS]


def over_steps(title: str, points: Points, unit: str, name: str, *, by_layer: bool = False) -> list[Figure]:
    """A few layers as curves, many as a map of layers and steps; `by_layer` gives both."""
    values = [value for _, ys in points.values() for value in ys]
    log = spans_magnitudes(values)
    figures = []
    longest = max(len(xs) for xs, _ in points.values())
    if len(points) <= COLOURS:
        series = [Series(module_name(path), xs, ys) for path, (xs, ys) in points.items()]
        figures.append(lines(title, series, x=unit, y=name, log=log))
    if len(points) > COLOURS or (by_layer and len(points) > 1 and longest > 2):
        figures.append(_map(title, points, unit, log))
    return figures


def _map(title: str, points: Points, unit: str, log: bool) -> Figure:
    paths = list(points)[:MOST_ROWS]
    places = sorted({x for xs, _ in points.values() for x in xs})
    block = -(-len(places) // MOST_COLUMNS)
    column = {x: n // block for n, x in enumerate(places)}
    width = max(column.values()) + 1
    total = np.zeros((len(paths), width))
    count = np.zeros((len(paths), width))
    for row, path in enumerate(paths):
        for x, y in zip(*points[path], strict=True):
            total[row, column[x]] += y
            count[row, column[x]] += 1
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (total / count).astype(np.float32)
    notes = [f"the first {len(paths)} of {len(points)}"] if len(points) > len(paths) else []
    notes += ["colours by magnitude"] if log else []
    heads = [number(places[n * block]) for n in range(width)]
    names = [module_name(path) for path in paths]
    return heat(f"{title} by layer", mean, rows=names, columns=heads, x=unit, note="; ".join(notes), log=log)


def _points(records: Sequence[Record], name: str, places: Mapping[str, int]) -> tuple[Points, str]:
    """Module -> its values over steps, or in the order of recording where steps begin again."""
    by_module = defaultdict[tuple[str, str], list[tuple[int, float]]](list)
    for record in records:
        value = record.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            by_module[record["module"], record.get("path") or ""].append((record["step"], float(value)))
    rising = all(all(a[0] < b[0] for a, b in pairwise(some)) for some in by_module.values())
    points: Points = {
        f"{module}{path}": (
            [float(step if rising else n) for n, (step, _) in enumerate(some)],
            [value for _, value in some],
        )
        for (module, path), some in sorted(
            by_module.items(), key=lambda item: places.get(item[0][0], len(places))
        )
    }
    return points, "step" if rising else "firing"


def _short(value: Any) -> str:
    return one_line(f"{value:.6g}" if isinstance(value, float) else str(value))

"""Pictures of what each hook recorded and captured: numbers over steps as charts, everything else as lines.

The keys of a record decide how it is shown, so records of new actions are shown too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from hookrun.engine.actions.base import ABOUT, OF_RANK
from hookrun.errors import counted, listed, printable, shortened
from hookrun.report.captures import MOST_VIEWS, place, view_capture
from hookrun.report.draw.charts import COLOURS, Figure, Series, lines, spans_magnitudes
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import MOST_HOOKS, MOST_ROWS, NOTICES, ON_PARAMETERS, Facts
from hookrun.report.lines import is_number
from hookrun.store.captures.read import StoredCapture
from hookrun.store.records import grouped

MOST_CHARTS = 16
MOST_MODES = 4
MOST_COLUMNS = 200
MOST_NAMED = 5
MOST_LINES = 60
MOST_CHARACTERS = 400

Record = Mapping[str, Any]
Points = dict[str, tuple[list[float], list[float]]]  # name -> steps, values


def recorded(record: Record) -> dict[str, Any]:
    """What the action recorded; empty for a notice."""
    if not NOTICES.isdisjoint(record):
        return {}
    return {key: value for key, value in record.items() if key not in ABOUT}


def is_measured(record: Record) -> bool:
    """Whether everything recorded is a number, which can be drawn over steps."""
    values = recorded(record).values()
    return bool(values) and all(map(is_number, values))


def as_lines(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """(place, text) of the first records that contain more than numbers."""
    told = (record for record in records if recorded(record) and not is_measured(record))
    for record in islice(told, MOST_LINES):
        words = "  ".join(
            f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={printable(str(value))}"
            for key, value in recorded(record).items()
        )
        at = f"{module_name(str(record['module']))} {printable(str(record.get('path') or ''))}".strip()
        yield f"step {record['step']}  {at}", words[:MOST_CHARACTERS]


def statistics(
    records: Sequence[Record], places: Mapping[str, int], *, are_gradients: bool
) -> Iterator[Figure]:
    """A chart for each number that a hook recorded; gradient norms come first, also as a map of layers.

    places: module or parameter -> its position in the model
    """
    measured = [record for record in records if is_measured(record)]
    modes = list(dict.fromkeys(str(record["mode"]) for record in measured))[:MOST_MODES]
    for mode in modes:
        of_mode = [record for record in measured if record["mode"] == mode]
        names = list(dict.fromkeys(key for record in of_mode for key in recorded(record)))
        where = f", {mode} mode" if len(modes) > 1 else ""
        for name in sorted(names[:MOST_CHARTS], key=lambda name: name != "norm"):
            is_gradient_norm = name == "norm" and are_gradients
            title = f"{'gradient norm' if is_gradient_norm else name}{where}"
            points, unit = _points(of_mode, name, places)
            yield from over_steps(title, points, unit, name, by_layer=is_gradient_norm)


def over_steps(
    title: str, points: Points, unit: str, name: str, *, by_layer: bool = False
) -> Iterator[Figure]:
    """A few layers as curves, many as a map of layers and steps; both with `by_layer`."""
    longest = max(len(xs) for xs, _ in points.values())
    if len(points) <= COLOURS:
        series = [Series(module_name(path), xs, ys) for path, (xs, ys) in points.items()]
        log = spans_magnitudes(value for each in series for value in each.y)
        yield lines(title, series, x=unit, y=name, log=log)
    if len(points) > COLOURS or (by_layer and len(points) > 1 and longest > 2):
        yield _map(title, points, unit)


def _map(title: str, points: Points, unit: str) -> Figure:
    """A map of layers over steps; coloured by magnitude if no value is negative and they differ by much.

    With more than `MOST_ROWS` layers, neighbours share a row, which shows their maximum.
    """
    xs, ys = (np.concatenate([np.array(pair[which]) for pair in points.values()]) for which in (0, 1))
    log = not (ys < 0).any() and spans_magnitudes(ys[ys > 0])
    places, column = np.unique(xs, return_inverse=True)
    block = -(-len(places) // MOST_COLUMNS)
    width = -(-len(places) // block)
    row = np.repeat(range(len(points)), [len(values) for _, values in points.values()])
    count, total = (
        np.bincount(row * width + column // block, weights, len(points) * width).reshape(-1, width)
        for weights in (None, ys)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, there = total / count, count > 0
    names = [module_name(path) for path in points]
    notes = [f"a column is the mean of {block} {unit}s"] if block > 1 else []
    share = -(-len(names) // MOST_ROWS)
    if share > 1:
        notes.append(f"a row is the largest of {share} layers")
        starts = range(0, len(names), share)
        mean = np.maximum.reduceat(np.where(there, mean, -np.inf), starts)  # NaN if one of them is
        there = np.logical_or.reduceat(there, starts)
        ends = [min(start + share, len(names)) - 1 for start in starts]
        names = [
            names[start] if start == end else f"{names[start]} … {names[end]}"
            for start, end in zip(starts, ends, strict=True)
        ]
    notes += ["colours by magnitude"] if log else []
    return HeatMap(
        f"{title} by layer",
        mean,
        rows=names,
        columns=[number(place) for place in places[::block]],
        x=unit,
        note="; ".join(notes),
        log=log,
        valid=there,
        facts=tuple(_of_single_layers(points, unit)),
    ).figure()


def _of_single_layers(points: Points, unit: str) -> Iterator[str]:
    """Texts that name the layers with the largest and smallest values, and those with zeros, NaN and infinities."""
    layers = {module_name(path): list(zip(xs, ys, strict=True)) for path, (xs, ys) in points.items()}
    sizes = {
        name: [(abs(y), x) for x, y in pairs if math.isfinite(y) and y] for name, pairs in layers.items()
    }
    for title, extreme, is_most in (("largest", max, True), ("smallest above 0", min, False)):
        # the first of equal ones
        extremes = [(name, *extreme(pairs, key=itemgetter(0))) for name, pairs in sizes.items() if pairs]
        extremes.sort(key=itemgetter(1), reverse=is_most)
        if len(extremes) > 1:
            some = [f"{name} {number(size)} ({unit} {number(x)})" for name, size, x in extremes[:MOST_NAMED]]
            yield f"{title}: {', '.join(some)}"
    zero = [name for name, pairs in layers.items() if not sizes[name] and any(y == 0 for _, y in pairs)]
    if zero:
        yield f"exactly 0 throughout, {counted(len(zero), 'layer')}: {listed(zero, MOST_NAMED)}"
    for kind, is_one in (("NaN", math.isnan), ("infinite", math.isinf)):
        steps = {name: [x for x, y in pairs if is_one(y)] for name, pairs in layers.items()}
        first = sorted((at[0], place, name) for place, (name, at) in enumerate(steps.items()) if at)
        if first:
            shown = listed([name for *_, name in first], MOST_NAMED)
            yield f"{kind} from {unit} {number(first[0][0])}, {counted(len(first), 'layer')}: {shown}"


def _points(records: Sequence[Record], name: str, places: Mapping[str, int]) -> tuple[Points, str]:
    """Module -> its values over steps, or over the order of recording if steps restart; and the name of that axis.

    Each rank that recorded its own rows has values of its own.
    """
    by_module = grouped(
        (record for record in records if name in record),
        lambda record: (
            str(record["module"]),
            record.get("path") or "",
            f", rank {record[OF_RANK]}" if OF_RANK in record else "",
        ),
    )
    points = {
        "".join(key): ([float(record["step"]) for record in at], [float(record[name]) for record in at])
        for key, at in sorted(by_module.items(), key=lambda item: places.get(item[0][0], len(places)))
    }
    if all(a < b for steps, _ in points.values() for a, b in pairwise(steps)):
        return points, "step"
    return {path: (list(map(float, range(len(ys)))), ys) for path, (_, ys) in points.items()}, "firing"


MOST_SAMPLES = 200
"""Samples that are listed with their predicted class."""


def build(facts: Facts) -> list[dict[str, Any]]:
    """The hooks that recorded something, in firing order; predictions come last.

    order: its position in the plan; -1 if the plan does not have it
    left:  captured tensors that are not drawn
    lines: (place, text) of the first records that contain more than numbers
    samples: for predictions, those of the samples
    """
    records = grouped(facts.stats.records, itemgetter("hook"))
    captured, predicted = (
        grouped(captures, attrgetter("hook")) for captures in (facts.captured, facts.predicted)
    )
    share = max(2, MOST_VIEWS // max(len(captured), 1))
    shares = dict.fromkeys(list(captured)[:MOST_VIEWS], share)
    order = {name: place for place, name in enumerate(facts.planned)}
    names = sorted(
        list(dict.fromkeys([*captured, *records]))[:MOST_HOOKS],
        key=lambda name: order.get(name, len(order)),
    )
    shown = [
        _of_hook(
            facts,
            name,
            order.get(name, -1),
            records.get(name, []),
            captured.get(name, []),
            shares.get(name, 0),
        )
        for name in names
    ]
    shown += [
        {
            "name": "predictions",
            "title": "what the model predicted",
            "order": -1,
            "figures": [],
            "views": [view_capture(capture, facts, is_prediction=True) for capture in captures[:share]],
            "left": captures[share:],
            "lines": [],
            "samples": _samples(facts),
        }
        for captures in list(predicted.values())[:MOST_VIEWS]
    ]
    return [each for each in shown if any(each[key] for key in ("figures", "views", "left", "lines"))]


def _of_hook(
    facts: Facts,
    name: str,
    order: int,
    records: Sequence[dict[str, Any]],
    captures: list[StoredCapture],
    share: int,
) -> dict[str, Any]:
    title, places = "", dict[str, int]()
    if hook := facts.planned.get(name):
        matches = counted(len(hook.targets), "parameter" if hook.hook in ON_PARAMETERS else "module")
        title = f"{hook.hook}, {hook.action} on {matches}"
        places = {match.path: place for place, match in enumerate(hook.targets)}
    captures.sort(key=lambda capture: places.get(capture.module, len(places)))
    views = [view_capture(capture, facts) for capture in captures[:share]]
    figures = list(islice(statistics(records, places, are_gradients=facts.sees_gradients(name)), MOST_CHARTS))
    if norms := {place(view.capture): view.norms for view in views if view.norms is not None}:
        figures += over_steps("norm of the captured gradient", norms, "step", "norm", by_layer=True)
    return {
        "name": name,
        "title": title,
        "order": order,
        "figures": figures,
        "views": views,
        "left": captures[share:],
        "lines": list(as_lines(records)),
        "samples": None,
    }


def _samples(facts: Facts) -> dict[str, Any] | None:
    """Split, sample, file, class and predicted class of the first samples; None if none has a class or a file.

    wrong: how many samples were misclassified; None if no class was predicted
    """
    lines = facts.samples.records
    if not any(line.get("class") or line.get("file") for line in lines):
        return None
    keys = ("file", "class", "predicted_class")
    judged = [line for line in lines if line.get("predicted_class") is not None]
    return {
        "rows": [
            (shortened(line["split"]), line["sample"], *(shortened(str(line.get(key) or "")) for key in keys))
            for line in lines[:MOST_SAMPLES]
        ],
        "total": len(lines),
        "wrong": sum(line["predicted_class"] != line.get("class") for line in judged) if judged else None,
    }

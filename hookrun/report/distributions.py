"""Statistics that are more than a number: histograms as a ridge, quantiles as a band, counts and channels as a map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from hookrun.errors import counted, listed
from hookrun.report.curves import (
    Record,
    by_module,
    is_listing,
    place_of,
    recorded,
)
from hookrun.report.draw.charts import (
    ALL,
    MOST_ROWS,
    Array,
    Figure,
    Series,
    Table,
    bars,
    lines,
    spans_magnitudes,
)
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.ridge import ridge
from hookrun.report.draw.text import module_name, number
from hookrun.report.lines import is_number, is_place
from hookrun.store.captures.read import spread
from hookrun.store.records import PlannedHookRecord

BINS = 64
MOST_RIDGES = 16
MOST_COLUMNS = 128
MOST_LAYERS = 400
MOST_NAMED = 24
OF_EXPERTS = ("dead", "hot")
"""Lists of records of routers, which name experts."""
OUTER = 0.001
"""The share of the elements at each end that may lie outside of a picture, where they are far from the others."""
_LARGEST = 1e280

Recordings = Sequence[tuple[float, Any]]
"""Steps or indices, each with what was recorded there."""


def quantiles_of(hook: PlannedHookRecord | None) -> list[str]:
    """The quantiles that the plan asks a hook for, lowest first; empty if there are none."""
    of = (hook.params or {}).get("of") if hook is not None else None
    for item in of if isinstance(of, list) else [of]:
        wanted = item.get("quantiles") if isinstance(item, dict) else None
        if wanted is not None:
            values = wanted if isinstance(wanted, list) else [wanted]
            return [number(value) for value in sorted(filter(is_number, values))]
    return []


def distributions(
    records: Iterable[Record], places: Mapping[str, int], quantiles: Sequence[str], most: int
) -> Iterator[Figure]:
    """A picture of each statistic with lists, at modules in the model's order; of many evenly spaced ones.

    places:    module or parameter -> its position in the model
    quantiles: which ones were recorded
    most:      how many pictures there are
    """
    by_name = dict[tuple[str, str], list[Record]]()
    for record in records:
        for name, value in recorded(record).items():
            if is_listing(value) and name not in OF_EXPERTS:
                by_name.setdefault((str(record["mode"]), name), []).append(record)
    modes = {mode for mode, _ in by_name}
    share = max(1, most // max(len(by_name), 1))
    for (mode, name), of_name in list(by_name.items())[:most]:
        modules, unit = by_module(of_name, name, places, is_listing)
        title = f"{name}, {mode} mode" if len(modes) > 1 else name
        if name == "counts" and len(modules) > 1:
            yield from _by_layer(title, modules, list(_of_experts(of_name)))
        paths = spread(list(modules), share)
        for path in paths:
            steps, values = modules[path]
            recordings = list(zip(steps, values, strict=True))
            figure = _picture(f"{title} of {module_name(path)}", name, recordings, unit, quantiles)
            if len(paths) < len(modules):
                note = f"{len(paths)} of {len(modules)} modules, evenly spaced"
                figure = replace(figure, note="; ".join(filter(None, [figure.note, note])))
            yield figure


def _by_layer(
    title: str, modules: Mapping[str, tuple[Sequence[float], Sequence[Any]]], facts: Sequence[str]
) -> Iterator[Figure]:
    """A map of the share that each index has of the counts of a layer; none without counts."""
    shares = dict[str, Array]()
    for path in spread(list(modules), MOST_LAYERS):
        _, values = modules[path]
        vectors = [vector for vector in map(_vector, values) if vector is not None]
        same = [vector for vector in vectors if len(vector) == len(vectors[-1])]
        total = np.sum(same, axis=0) if same else np.zeros(0)
        if total.sum() > 0:
            shares[module_name(path)] = total / total.sum()
    if not shares:
        return
    width = max(map(len, shares.values()))
    table = np.full((len(shares), width), math.nan)
    for row, share in zip(table, shares.values(), strict=True):
        row[: len(share)] = share
    table, columns, note = _blocks(table)
    yield HeatMap(
        f"share of {title} by layer",
        table,
        rows=list(shares),
        columns=columns,
        x="expert" if facts else "index",
        note=f"over all recorded steps; an even share is {1 / width:.3g}{note}",
        numbers=len(columns) <= 12,
        limits=(0.0, float(np.nanmax(table))),
        facts=facts,
        written="{:.1%}".format,
    ).figure()


def _of_experts(records: Sequence[Record]) -> Iterator[str]:
    """Texts that name the dead and the hot experts, as the last record of each layer has them."""
    last = {"".join(place_of(record)): record for record in records}
    for kind in OF_EXPERTS:
        named = list[str]()
        for path, record in last.items():
            experts = record.get(kind)
            if isinstance(experts, list) and experts:
                named.append(
                    f"{module_name(path)}: {listed(map(str, filter(is_place, experts)), MOST_NAMED)}"
                )
        if named:
            yield f"{kind} at the end, {counted(len(named), 'layer')}: {listed(named, MOST_ROWS)}"


def _blocks(table: Array) -> tuple[Array, list[str], str]:
    """Numbers [n, indices] with few columns: of many, each is the mean of neighbours. Their names, and a note."""
    block = -(-table.shape[1] // MOST_COLUMNS)
    starts = range(0, table.shape[1], block)
    means = [table[:, start : start + block].mean(axis=1) for start in starts]
    note = f"; each column is the mean of {block} neighbours" if block > 1 else ""
    return np.stack(means, axis=1), list(map(str, starts)), note


def _picture(title: str, name: str, recordings: Recordings, unit: str, quantiles: Sequence[str]) -> Figure:
    """The picture of a statistic at a module; with `dim`, histograms and lists of each index are of the last step."""
    step, last = recordings[-1]
    if isinstance(last, list) and last and is_listing(last[0]):
        recordings = list(enumerate(last))
        title += f", {unit} {number(step)}"
        unit = "index"
        last = last[0]
    if isinstance(last, dict):
        return _ridge(title, recordings, unit)
    length = len(last)
    at = list[float]()
    rows = list[Array]()
    for place, value in recordings:
        row = _vector(value)
        if row is not None and len(row) == length:
            at.append(place)
            rows.append(row)
    if not rows:
        return _not_drawn(title, "it holds more than numbers")
    table = np.stack(rows)
    if name == "quantiles":
        return _band(title, at, table, unit, quantiles)
    return _map(title, at, table, unit)


def _not_drawn(title: str, why: str) -> Figure:
    return Figure(title, Markup(""), note=f"not drawn: {why}")


def _vector(value: Any) -> Array | None:
    """[n] of a list of numbers; None for anything else."""
    if not isinstance(value, list) or not value or not all(map(is_number, value)):
        return None
    return np.array(value, dtype=np.float64)


def _histogram(value: Any) -> tuple[Array, Array] | None:
    """Counts [n] and rising edges [n + 1]; None if it is not a histogram of at least one element."""
    if not isinstance(value, dict):
        return None
    counts = _vector(value.get("counts"))
    edges = _vector(value.get("edges"))
    if counts is None or edges is None or len(edges) != len(counts) + 1:
        return None
    edges = edges.clip(-_LARGEST, _LARGEST)
    total = counts.sum()
    if not (total > 0 and np.isfinite(total) and (counts >= 0).all() and (np.diff(edges) > 0).all()):
        return None
    return counts, edges


def _ridge(title: str, recordings: Recordings, unit: str) -> Figure:
    """Histograms with any edges, counted again in bins that all of them share."""
    shown = spread(recordings, MOST_RIDGES)
    places = list[float]()
    cumulated = list[tuple[Array, Array]]()
    rows = list[tuple[str, ...]]()
    for place, value in shown:
        histogram = _histogram(value)
        if histogram is None:
            continue
        counts, edges = histogram
        total = float(counts.sum())
        below = np.append(0.0, counts.cumsum()) / total
        places.append(place)
        cumulated.append((below, edges))
        middle = float(np.interp(0.5, below, edges))
        rows.append(tuple(map(number, (place, total, float(edges[0]), middle, float(edges[-1])))))
    if not rows:
        return _not_drawn(title, "it has no histogram of finite values")
    notes = ["each row is as high as its fullest bin"]
    low, high = _ends(cumulated, 0.0)
    inner = _ends(cumulated, OUTER)
    if high - low > 2 * (inner[1] - inner[0]) > 0:
        low, high = inner
        notes.append(f"up to {OUTER:.1%} of the values at each end are outside of the picture")
    edges = np.linspace(low, high, BINS + 1)
    shares = np.stack([np.diff(np.interp(edges, ends, below)) for below, ends in cumulated])
    if len(shown) < len(recordings):
        notes.append(f"{len(shown)} of {len(recordings):,} {unit}s, evenly spaced")
    if len(rows) < len(shown):
        notes.append(f"{len(shown) - len(rows)} of them have no histogram of finite values")
    table = Table(ALL, (unit, "values", "least", "median", "largest"), tuple(rows))
    return ridge(title, places, shares, edges, y=unit, table=table, note="; ".join(notes))


def _ends(cumulated: Sequence[tuple[Array, Array]], outer: float) -> tuple[float, float]:
    """The least and the largest value of all histograms, without a share of each at both ends."""
    ends = [np.interp((outer, 1 - outer), below, edges) for below, edges in cumulated]
    return float(min(low for low, _ in ends)), float(max(high for _, high in ends))


def _band(title: str, at: Sequence[float], table: Array, unit: str, names: Sequence[str]) -> Figure:
    """Quantiles [n, k]: the middle one as a line, in a band from the lowest to the highest."""
    table = np.sort(table, axis=1)
    count = table.shape[1]
    if len(names) != count:
        names = [f"quantile {place + 1} of {count}" for place in range(count)]
    if len(at) == 1:
        return bars(title, table[0].tolist(), x="quantile", y="value", names=names)
    middle = count // 2
    line, low, high = (table[:, column].tolist() for column in (middle, 0, -1))
    curve = Series(f"quantile {names[middle]}", at, line, low, high)
    note = f"line: quantile {names[middle]}; band: from {names[0]} to {names[-1]}"
    return lines(title, [curve], x=unit, y="value", note=note)


def _map(title: str, at: Sequence[float], table: Array, unit: str) -> Figure:
    """Numbers [n, indices] as a map of steps and indices; as bars of a single step."""
    means, names, note = _blocks(table)
    note = note.removeprefix("; ")
    if len(at) == 1:
        return bars(
            f"{title}, {unit} {number(at[0])}",
            means[0].tolist(),
            x="index",
            y="value",
            names=names,
            note=note,
        )
    kept = spread(range(len(at)), MOST_ROWS)
    means = means[list(kept)]
    positive = means[means > 0].ravel().tolist()
    log = not (means < 0).any() and spans_magnitudes(positive, 1000)
    return HeatMap(
        title,
        means,
        rows=[f"{unit} {number(at[row])}" for row in kept],
        columns=names,
        x="index",
        note=note,
        log=log,
        valid=np.ones(means.shape, dtype=bool),
    ).figure()

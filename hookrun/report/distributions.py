"""Statistics that are more than a number: histograms as a ridge, quantiles as a band, counts and channels as a map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from hookrun.errors import counted, listed
from hookrun.report.curves import Record, by_module, is_listing, place_of, recorded
from hookrun.report.draw.charts import ALL, MOST_ROWS, Array, Figure, Series, Table, bars, lines
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.ridge import ridge
from hookrun.report.draw.text import module_name, number
from hookrun.report.lines import is_number
from hookrun.store.captures.read import spread
from hookrun.store.records import PlannedHookRecord, grouped

BINS = 64
MOST_RIDGES = 16
MOST_COLUMNS = 128
OUTER = 0.001
"""The share of the elements at each end that is outside of a ridge."""
OF_EXPERTS = ("dead", "hot")
"""Lists of records that name experts."""
_LARGEST = 1e280


def quantiles_of(hook: PlannedHookRecord | None) -> list[str]:
    """The quantiles that the plan asks a hook for, lowest first; empty if there are none."""
    of = (hook.params or {}).get("of") if hook is not None else None
    for item in of if isinstance(of, list) else [of]:
        if isinstance(item, dict) and isinstance(item.get("quantiles"), list):
            return list(map(number, sorted(filter(is_number, item["quantiles"]))))
    return []


def distributions(
    records: Sequence[Record], places: Mapping[str, int], quantiles: Sequence[str], most: int
) -> Iterator[Figure]:
    """A picture of each statistic of measured records that has lists, at modules in the model's order.

    places:    module or parameter -> its position in the model
    quantiles: which ones were recorded
    most:      how many pictures there are: of more, the modules are evenly spaced
    """
    names = dict[tuple[str, str], None]()
    for record in records:
        of_record = recorded(record).items()
        names |= {(str(record["mode"]), name): None for name, value in of_record if is_listing(value)}
    shown = [key for key in names if key[1] not in OF_EXPERTS][:most]
    for mode, name in shown:
        of_mode = [record for record in records if str(record["mode"]) == mode]
        modules, unit = by_module(of_mode, name, places, is_listing)
        title = f"{name}, {mode} mode" if len({mode for mode, _ in shown}) > 1 else name
        if name == "counts" and len(modules) > 1:
            noun = "expert" if "dead" in of_mode[0] else "index"
            yield from _load(title, modules, noun, list(_of_experts(of_mode)))
        for path in spread(list(modules), max(1, most // len(shown))):
            yield _picture(f"{title} of {module_name(path)}", name, *modules[path], unit, quantiles)


def _picture(
    title: str, name: str, at: Sequence[float], values: Sequence[Any], unit: str, quantiles: Sequence[str]
) -> Figure:
    """The picture of a statistic at a module; what each index of a dimension has is of the last step."""
    if isinstance(values[-1], list) and any(map(is_listing, values[-1])):
        title += f", {unit} {number(at[-1])}"
        values = values[-1]
        at = range(len(values))
        unit = "index"
    histograms = {
        place: found for place, value in zip(at, values, strict=True) if (found := _histogram(value))
    }
    if histograms:
        return _ridge(title, histograms, unit)
    rows = _rows(at, values)
    if not rows:
        return Figure(
            title, Markup(""), note="not drawn: neither lists of numbers nor histograms of finite values"
        )
    table = np.stack(list(rows.values()))
    if name == "quantiles" and len(rows) > 1:
        return _band(title, list(rows), np.sort(table, axis=1), unit, quantiles)
    kept = spread(list(rows), MOST_ROWS)
    return _map(title, {f"{unit} {number(place)}": rows[place] for place in kept}, "index")


def _array(value: Any) -> Array | None:
    """[n] of a list of numbers; None for anything else."""
    if not isinstance(value, list) or not value or not all(map(is_number, value)):
        return None
    return np.array(value, dtype=np.float64)


def _rows(at: Sequence[float], values: Sequence[Any]) -> dict[float, Array]:
    """The lists of numbers at each place, of those that are as long as the last one."""
    rows = dict[float, Array]()
    for place, value in zip(at, values, strict=True):
        row = _array(value)
        if row is not None:
            rows[place] = row
    return {place: row for place, row in rows.items() if len(row) == len(list(rows.values())[-1])}


def _histogram(value: Any) -> tuple[Array, Array] | None:
    """Edges [n + 1] and the share of elements below each; None if it is not a histogram of at least one element."""
    if not isinstance(value, dict):
        return None
    counts = _array(value.get("counts"))
    edges = _array(value.get("edges"))
    if counts is None or edges is None or len(edges) != len(counts) + 1:
        return None
    edges = edges.clip(-_LARGEST, _LARGEST)
    below = np.append(0, counts.cumsum())
    if not (0 < below[-1] < np.inf and (counts >= 0).all() and (np.diff(edges) > 0).all()):
        return None
    return edges, below / below[-1]


def _ridge(title: str, histograms: Mapping[float, tuple[Array, Array]], unit: str) -> Figure:
    """Histograms with any edges, in bins that all of them share."""
    places = spread(list(histograms), MOST_RIDGES)
    ends = list[Array]()
    rows = list[tuple[str, ...]]()
    for place in places:
        edges, below = histograms[place]
        ends.append(np.interp((OUTER, 0.5, 1 - OUTER), below, edges))
        least, middle, largest = ends[-1].tolist()
        rows.append(tuple(map(number, (place, float(edges[0]), least, middle, largest, float(edges[-1])))))
    shared = np.linspace(np.min(ends), np.max(ends), BINS + 1)
    shares = np.stack([np.diff(np.interp(shared, *histograms[place])) for place in places])
    heads = (unit, "first edge", f"quantile {OUTER}", "median", f"quantile {1 - OUTER}", "last edge")
    note = f"each row is as high as its fullest bin; {OUTER:.1%} of its values are not drawn at each end"
    if len(places) < len(histograms):
        note += f"; {len(places)} of {len(histograms):,} {unit}s"
    return ridge(title, places, shares, shared, y=unit, table=Table(ALL, heads, tuple(rows)), note=note)


def _band(title: str, at: Sequence[float], table: Array, unit: str, names: Sequence[str]) -> Figure:
    """Quantiles [n, k]: the middle one as a line, in a band from the lowest to the highest."""
    count = table.shape[1]
    if len(names) != count:
        names = [f"{place + 1} of {count}" for place in range(count)]
    middle = count // 2
    columns = table.T.tolist()
    curve = Series(f"quantile {names[middle]}", at, columns[middle], columns[0], columns[-1])
    note = f"line: quantile {names[middle]}; band: from {names[0]} to {names[-1]}"
    return lines(title, [curve], x=unit, y="value", note=note)


def _map(title: str, rows: Mapping[str, Array], x: str, **options: Any) -> Figure:
    """Rows of equal length as a map, with the mean of neighbours where they are long; a single row as bars."""
    table = np.stack(list(rows.values()))
    block = -(-table.shape[1] // MOST_COLUMNS)
    starts = range(0, table.shape[1], block)
    table = np.stack([table[:, start : start + block].mean(axis=1) for start in starts], axis=1)
    if block > 1:
        x += f", the mean of {block} neighbours"
    columns = list(map(str, starts))
    if len(rows) == 1:
        return bars(f"{title}, {next(iter(rows))}", table[0].tolist(), x=x, y="value", names=columns)
    valid = np.ones(table.shape, dtype=bool)
    return HeatMap(title, table, rows=list(rows), columns=columns, x=x, valid=valid, **options).figure()


def _load(
    title: str, modules: Mapping[str, tuple[Sequence[float], Sequence[Any]]], noun: str, facts: Sequence[str]
) -> Iterator[Figure]:
    """A map of the share that each index has of the counts of a layer; none without counts."""
    shares = dict[str, Array]()
    for path, (at, values) in modules.items():
        total = sum(_rows(at, values).values(), start=np.zeros(1))
        if 0 < total.sum() < np.inf:
            shares[module_name(path)] = total / total.sum()
    for length, paths in grouped(shares, lambda path: len(shares[path])).items():
        yield _map(
            f"share of {title} by layer",
            {path: shares[path] for path in paths},
            noun,
            note=f"over all recorded steps; an even share is {1 / length:.1%}",
            facts=facts,
            numbers=length <= 12,
            written="{:.1%}".format,
        )


def _of_experts(records: Sequence[Record]) -> Iterator[str]:
    """Texts that name the dead and the hot experts, as the last record of each layer has them."""
    last = {"".join(place_of(record)): record for record in records}
    for kind in OF_EXPERTS:
        named = [
            f"{module_name(path)}: {listed(map(str, record[kind]))}"
            for path, record in last.items()
            if record.get(kind)
        ]
        if named:
            yield f"{kind} at the end in {counted(len(named), 'layer')}: {listed(named, MOST_ROWS)}"

"""Statistics that are more than a number: histograms as a ridge, quantiles as a band, counts and channels as a map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from markupsafe import Markup

from hookrun.errors import counted, listed, shortened
from hookrun.report.curves import Record, by_module, is_listing, place_of, recorded
from hookrun.report.draw.charts import ALL, MOST_ROWS, Array, Figure, Series, Table, bars, lines
from hookrun.report.draw.pictures import HeatMap
from hookrun.report.draw.ridge import ridge
from hookrun.report.draw.text import module_name, number
from hookrun.report.lines import is_number
from hookrun.store.captures.read import spread
from hookrun.store.records import PlannedHookRecord, grouped

K = TypeVar("K")

BINS = 64
MOST_RIDGES = 16
MOST_COLUMNS = 128
OUTER = 0.001
"""The share of the elements at each end that is outside of a ridge."""
OF_EXPERTS = ("dead", "hot")
"""Lists of records that name experts."""
_LARGEST = 1e280
"""Larger finite values are drawn as this one."""


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
        if name == "counts" and len(modules) > 1:
            yield _load(f"share of {name} by layer, {mode} mode", modules, of_mode)
        for path in spread(list(modules), max(1, most // len(shown))):
            yield _picture(
                f"{name} of {module_name(path)}, {mode} mode", name, *modules[path], unit, quantiles
            )


@np.errstate(invalid="ignore")  # a mean with both infinities is NaN
def _picture(
    title: str, name: str, at: Sequence[float], values: Sequence[Any], unit: str, quantiles: Sequence[str]
) -> Figure:
    """The picture of a statistic at a module; what each index of a dimension has is of the last step."""
    if isinstance(values[-1], list) and any(map(is_listing, values[-1])):
        title += f", {unit} {number(at[-1])}"
        values = values[-1]
        at = range(len(values))
        unit = "index"
    found = zip(at, map(_histogram, values), strict=True)
    histograms = {place: histogram for place, histogram in found if histogram is not None}
    if histograms:
        return _ridge(title, histograms, unit)
    rows = _rows(at, values)
    if name == "quantiles" and len(rows) > 1:
        return _band(title, rows, unit, quantiles)
    kept = spread(list(rows), MOST_ROWS)
    return _map(title, {f"{unit} {number(place)}": rows[place] for place in kept}, "index")


def _array(value: Any) -> Array | None:
    """[n] of a list of numbers; None for anything else."""
    if not isinstance(value, list) or not value or not all(map(is_number, value)):
        return None
    array = np.array(value, dtype=np.float64)
    return np.where(np.isinf(array), array, array.clip(-_LARGEST, _LARGEST))


def _rows(at: Sequence[K], values: Sequence[Any]) -> dict[K, Array]:
    """The lists of numbers at each place, of those that are as long as the last one."""
    found = zip(at, map(_array, values), strict=True)
    rows = [(place, row) for place, row in found if row is not None]
    return {place: row for place, row in rows if len(row) == len(rows[-1][1])}


def _histogram(value: Any) -> tuple[Array, Array] | None:
    """Edges [n + 1] and the share of elements below each; None if it is not a histogram of at least one element."""
    if not isinstance(value, dict):
        return None
    counts = _array(value.get("counts"))
    edges = _array(value.get("edges"))
    if counts is None or edges is None or len(edges) != len(counts) + 1:
        return None
    below = np.append(0, counts.cumsum())
    rises = bool(np.isfinite(edges).all() and (np.diff(edges) > 0).all() and (counts >= 0).all())
    return (edges, below / below[-1]) if rises and 0 < below[-1] < np.inf else None


def _ridge(title: str, histograms: Mapping[float, tuple[Array, Array]], unit: str) -> Figure:
    """Histograms with any edges, in bins that all of them share."""
    places = spread(list(histograms), MOST_RIDGES)
    ends = np.stack([np.interp((OUTER, 0.5, 1 - OUTER), *histograms[place][::-1]) for place in places])
    edges = np.linspace(ends.min(), ends.max(), BINS + 1)
    shares = np.stack([np.diff(np.interp(edges, *histograms[place])) for place in places])
    rows = np.column_stack([places, ends]).tolist()
    heads = (unit, f"quantile {OUTER}", "median", f"quantile {1 - OUTER}")
    table = Table(ALL, heads, tuple(tuple(map(number, row)) for row in rows))
    note = (
        f"{len(places)} of {len(histograms):,} rows; each is as high as its fullest bin; "
        f"{OUTER:.1%} of its values are not drawn at each end"
    )
    return ridge(title, places, shares, edges, y=unit, table=table, note=note)


def _band(title: str, rows: Mapping[float, Array], unit: str, names: Sequence[str]) -> Figure:
    """Quantiles [k] at each place: the middle one as a line, in a band from the lowest to the highest."""
    columns = np.sort(list(rows.values()), axis=1).T.tolist()
    if len(names) != len(columns):
        names = [f"{place + 1} of {len(columns)}" for place in range(len(columns))]
    middle = len(columns) // 2
    curve = Series(f"quantile {names[middle]}", list(rows), columns[middle], columns[0], columns[-1])
    note = f"line: quantile {names[middle]}; band: from {names[0]} to {names[-1]}"
    return lines(title, [curve], x=unit, y="value", note=note)


def _map(title: str, rows: Mapping[str, Array], x: str, **options: Any) -> Figure:
    """Rows of equal length as a map, with the mean of neighbours where they are long; a single row as bars."""
    if not rows:
        why = "not drawn: neither lists of numbers nor histograms of finite values"
        return Figure(title, Markup(""), note=why)
    table = np.stack(list(rows.values()))
    block = -(-table.shape[1] // MOST_COLUMNS)
    columns = range(0, table.shape[1], block)
    table = np.stack([table[:, start : start + block].mean(axis=1) for start in columns], axis=1)
    names = list(map(str, columns))
    if block > 1:
        x += f", the mean of {block} neighbours"
    if len(rows) == 1:
        return bars(f"{title}, {next(iter(rows))}", table[0].tolist(), x=x, y="value", names=names)
    valid = np.ones(table.shape, dtype=bool)
    return HeatMap(title, table, rows=list(rows), columns=names, x=x, valid=valid, **options).figure()


@np.errstate(invalid="ignore")
def _load(
    title: str, modules: Mapping[str, tuple[Sequence[float], Sequence[Any]]], records: Sequence[Record]
) -> Figure:
    """A map of the share that each index has of the counts of a layer."""
    sums = [np.sum(list(_rows(at, values).values()), axis=0).tolist() for at, values in modules.values()]
    rows = _rows(list(map(module_name, modules)), sums)
    length = max(map(len, rows.values()), default=1)
    return _map(
        title,
        {name: row / row.sum() for name, row in rows.items()},
        "expert" if "dead" in records[0] else "index",
        note=f"over all recorded steps; an even share is {1 / length:.1%}",
        facts=list(_of_experts(records)),
        numbers=length <= 12,
        written="{:.1%}".format,
    )


def _of_experts(records: Sequence[Record]) -> Iterator[str]:
    """Texts that name the dead and the hot experts, as the last record of each layer has them."""
    layers = grouped(records, lambda record: module_name("".join(place_of(record))))
    for kind in OF_EXPERTS:
        last = {name: of_layer[-1].get(kind) for name, of_layer in layers.items()}
        named = [f"{name}: {shortened(str(experts))}" for name, experts in last.items() if experts]
        if named:
            yield f"{kind} at the end in {counted(len(named), 'layer')}: {listed(named, MOST_ROWS)}"

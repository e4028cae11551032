"""The content of a picture as text and as a table, for screen readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookrun.errors import counted, printable
from hookrun.report.draw.text import number
from hookrun.store.captures.read import spread

Array = NDArray[np.floating[Any]]

MOST_ROWS = 24
"""Rows of a table; of more, evenly spaced ones are shown, with the first and the last."""
MOST_CELLS = 400
"""Cells of a map that are all listed; for a larger map the table has one line for each row."""
MOST_SERIES = 8
ALL = "the numbers"


@dataclass(frozen=True)
class Table:
    """The numbers of a picture.

    heads: titles of the columns
    rows:  texts, one for each column
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Series:
    """Points in rising order of x, joined by a line.

    low, high: the edges of a band around the line
    dots:      points without a line
    thin:      a thin line without points, behind the others
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dots: bool = False
    thin: bool = False


def of_curves(
    title: str, curves: Sequence[Series], x: str, y: str, labels: Sequence[str] | None
) -> tuple[str, Table]:
    """A text with the ends and extremes of each curve, and a table of the values of all curves by x."""

    def place(at: float) -> str:
        return labels[int(at)] if labels else number(at)

    said = [f"{title}: {y} by {x}"]
    for curve in curves[:MOST_SERIES]:
        finite = [value for value in curve.y if math.isfinite(value)]
        if not finite:
            said.append(f"{curve.name}: no finite value")
            continue
        ends = f"{number(curve.y[0])} at {place(curve.x[0])}, {number(curve.y[-1])} at {place(curve.x[-1])}"
        said.append(f"{curve.name}: {ends}, least {number(min(finite))}, largest {number(max(finite))}")
    if len(curves) > MOST_SERIES:
        said.append(f"and {counted(len(curves) - MOST_SERIES, 'curve')} more")
    known = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    places = sorted({at for curve in curves for at in curve.x})
    rows = [(place(at), *(number(each.get(at)) for each in known)) for at in spread(places, MOST_ROWS)]
    heads = (x, *(curve.name for curve in curves))
    return "; ".join(said), _table(heads, rows, len(places), "point")


def of_bins(title: str, counts: Sequence[int], edges: Sequence[float]) -> tuple[str, Table]:
    """A text with the range and the largest bin, and a table of the counts of pairs of neighbouring bins."""
    total, fullest = sum(counts), max(range(len(counts)), key=counts.__getitem__)
    where = f"{number(edges[fullest])} to {number(edges[fullest + 1])}"
    said = (
        f"{title}: {total:,} values from {number(edges[0])} to {number(edges[-1])}, most of them in {where}"
    )
    step = -(-len(counts) // MOST_ROWS)
    rows = [
        (number(edges[start]), number(edges[min(start + step, len(counts))]), f"{count:,}")
        for start in range(0, len(counts), step)
        if (count := sum(counts[start : start + step]))
    ]
    return said, Table(ALL, ("from", "to", "count"), tuple(rows))


def of_bars(
    title: str, values: Sequence[float], names: Sequence[str], x: str, y: str, errors: Sequence[float] | None
) -> tuple[str, Table]:
    """A text with the minimum and the maximum, and a table of all values."""
    said = f"{title}: {counted(len(values), 'bar')} of {y} by {x}{_extremes(np.array(values), names)}"
    heads, columns = [x, y], [names, list(map(number, values))]
    if errors is not None:
        heads.append("standard deviation")
        columns.append(list(map(number, errors)))
    return said, Table(ALL, tuple(heads), tuple(zip(*columns, strict=True)))


def of_cells(title: str, values: Array, rows: Sequence[str], columns: Sequence[str]) -> tuple[str, Table]:
    """For a map: a text with the minimum and the maximum, and a table of all cells, or of each row of a large map."""
    names = [" ".join(filter(None, [row, column])) for row in rows for column in columns]
    said = f"{title}: a map of {counted(len(rows), 'row')} and {counted(len(columns), 'column')}"
    said += _extremes(values.ravel(), names)
    if values.size <= MOST_CELLS and values.shape[1] <= MOST_ROWS:
        lines = [
            (rows[n], *("" if math.isnan(value) else number(value) for value in values[n].tolist()))
            for n in range(len(rows))
        ]
        return said, Table(ALL, ("", *columns), tuple(lines))
    lines = [(rows[n], *_extent(values[n])) for n in spread(range(len(rows)), MOST_ROWS)]
    return said, _table(("", "least", "mean", "largest"), lines, len(rows), "row")


def of_tiles(title: str, tiles: Array, rows: Sequence[str], columns: str) -> tuple[str, Table]:
    """For tiles [rows, columns, height, width]: a text that describes them, and a table of the range of each tile."""
    count, across, height, width = tiles.shape
    said = f"{title}: {counted(count * across, 'picture')} of {height} × {width}, {columns}"
    low, _, high = _extent(tiles)
    lines = [
        (rows[row] if len(rows) > row else "", str(column), *_extent(tiles[row, column]))
        for row in range(count)
        for column in spread(range(across), max(MOST_ROWS // count, 1))
    ]
    table = _table(("", "picture", "least", "mean", "largest"), lines, count * across, "picture")
    return f"{said}; values from {low} to {high}", table


def _extremes(values: Array, names: Sequence[str]) -> str:
    """``, least 1 at a, largest 3 at b``: of the finite ones of the values [n], which have these names."""
    held = np.where(np.isfinite(values), values, np.nan)
    if np.isnan(held).all():
        return ""
    least, largest = int(np.nanargmin(held)), int(np.nanargmax(held))
    return (
        f", least {number(float(values[least]))} at {names[least]}, "
        f"largest {number(float(values[largest]))} at {names[largest]}"
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: int, noun: str) -> Table:
    title = ALL if len(rows) == total else f"{ALL}, {len(rows)} of {counted(total, noun)}"
    return Table(title, tuple(map(printable, heads)), tuple(rows))


def _extent(values: Array) -> tuple[str, str, str]:
    """Texts of the minimum, mean and maximum of the finite values."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return ("–", "–", "–")
    return number(float(finite.min())), number(float(finite.mean())), number(float(finite.max()))

"""Arrays as pictures: inline PNG, one byte for each pixel."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product, repeat, zip_longest
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from hookrun.errors import printable
from hookrun.report.draw.charts import Array as Array
from hookrun.report.draw.charts import Figure, of_cells, of_tiles
from hookrun.report.draw.rendering import rendered
from hookrun.report.draw.text import fitted, number, tick

Mask = NDArray[np.bool_]

LEVELS = 255
"""Colours of a palette. A pixel is one byte, so one value is left for a pixel without a colour."""

MOST_PIXELS = 56
"""Largest width and height of a tile in pixels; larger ones are averaged down."""
MOST_PAGED_PIXELS = 28
"""The same for tiles that are shown on demand."""
MOST_PAGED = 3 * 2**20
"""Bytes of a page that pictures on demand may use, all together."""
_BESIDE = {"exactly 0": (0x8A, 0x91, 0x99), "NaN": (0xFF, 0x2F, 0xD0), "infinite": (0xFF, 0x6A, 0x13)}
"""Values that have colours outside the scale."""
_CLEAR = LEVELS
"""The byte of a transparent pixel; the bytes just below it are values outside the scale, if a picture has any."""
_FULL_ROWS = 60
_FULL_HEIGHT = 13
"""Up to this number of rows, each has its name and this height in pixels; more rows are lower, only some with names."""
_NAMES_APART = 12
_LIGHT = 140
"""Brightness, from 0 to 255, from which on letters are dark."""
_LOWEST = 5
_LEVEL = 6
"""Characters of the name of a column; longer names stand upright."""
MOST_UPRIGHT = 40
_MANY = 1000
"""From this number of values on, the scale of colours leaves out the most extreme half per cent at each end."""


def mosaic(
    title: str,
    tiles: Array,
    *,
    rows: Sequence[str],
    columns: str,
    note: str = "",
    inputs: Sequence[str] = (),
    pages: int = 0,
    room: int = 0,
    pixels: int = MOST_PIXELS,
) -> Figure:
    """Tiles [rows, columns, height, width] beside each other, all on one scale of colours.

    NaN and infinities have colours of their own.

    inputs: for each row the URL of a picture of the sample, or ""
    pages:  how many columns are shown at a time; the others are shown on demand, smaller, if there is room; 0: all
    room:   how many bytes the columns on demand may take
    pixels: the largest width and height of a tile that is shown at once
    """
    across = tiles.shape[1]
    first = tiles
    shown = columns
    limits = None
    if 0 < pages < across:
        first = tiles[:, :pages]
        shown = f"{columns}s 0–{pages - 1} of {across}"
        limits = _ends(tiles[np.isfinite(tiles)])
    says, table = of_tiles(title, first, rows, shown)
    drawn = _colours(*_sheet(first, pixels), limits=limits)
    address = drawn.png()
    notes = [note] if note else []
    further: list[dict[str, str]] = []
    for start in range(first.shape[1], across, pages or across):
        later, _ = encoded(*_sheet(tiles[:, start : start + pages], MOST_PAGED_PIXELS), limits=limits)
        room -= len(later)
        if room < 0:
            left = across - start
            notes.append(f"{left} of its {columns}s are left out, since the page would become too large")
            break
        last = min(start + pages, across) - 1
        further.append({"src": later, "says": f"{columns}s {start}–{last} of {across}"})
    body = rendered(
        "mosaic.html",
        title=title,
        says=says,
        rows=list(zip_longest(rows, inputs, fillvalue="")),
        image=address,
        further=json.dumps(further) if further else "",
        shown=shown,
    )
    size = drawn.index.shape
    alone = partial(rendered, "mosaic.svg", image=address, size=size, rows=rows, shown=shown, ends=drawn.ends)
    said = "; ".join(notes)
    return Figure(title, body, note=said, wide=True, scale=drawn.scale, table=table, alone=alone)


def _sheet(tiles: Array, most: int) -> tuple[Array, Mask]:
    """The tiles with a pixel between them, and which pixels are theirs.

    Tiles with a side of more than `most` pixels are made smaller: each pixel is the mean of a block.
    """
    blocks = [-(-side // most) for side in tiles.shape[2:]]
    if max(blocks) > 1:
        tiles = functional.avg_pool2d(torch.from_numpy(tiles), blocks, ceil_mode=True).numpy()
    gaps = ((0, 0), (0, 0), (0, 1), (0, 1))
    rows, columns, height, width = tiles.shape
    size = rows * (height + 1), columns * (width + 1)
    sheets = []
    for part in (tiles, np.ones(tiles.shape, dtype=bool)):
        sheets.append(np.pad(part, gaps).swapaxes(1, 2).reshape(size)[:-1, :-1])
    sheet, is_tile = sheets
    return sheet, is_tile


def _ends(finite: Array) -> tuple[float, float]:
    """The ends of the scale of these values."""
    if not finite.size:
        return 0.0, 1.0
    low, high = np.percentile(finite, (0.5, 99.5) if finite.size >= _MANY else (0, 100))
    return float(low), float(high)


@dataclass(frozen=True)
class HeatMap:
    """A matrix as coloured cells with names for its rows, and for its columns, or some of many.

    x:       the name of the axis of the columns
    log:     colours by magnitude, for values that are not negative; exactly 0 has a colour of its own
    numbers: write the values into the cells
    limits:  the ends of the scale; those of the values unless given
    valid:   which cells hold a value: NaN and infinities among them have colours of their own; None: the finite ones
    facts:   texts about single rows, one line each
    centre:  the value of the colour in the middle; 0 for values on both sides of it
    links:   for each cell the address of the page that a click opens, or ""
    written: how a value is written into its cell
    """

    title: str
    values: Array
    rows: Sequence[str]
    columns: Sequence[str]
    x: str
    note: str = ""
    log: bool = False
    numbers: bool = False
    limits: tuple[float, float] | None = None
    valid: Mask | None = None
    facts: Sequence[str] = ()
    centre: float | None = None
    links: Sequence[Sequence[str]] = ()
    written: Callable[[float], str] = number

    def figure(self) -> Figure:
        """The picture with its scale and its table."""
        colours = _colours(self.values, self.valid, log=self.log, limits=self.limits, centre=self.centre)
        has_cells = self.numbers or bool(self.links)
        wide = len(self.columns) > 30 or len(self.rows) > _FULL_ROWS or has_cells
        column_start, column_names = fitted(self.columns)
        row_start, row_names = fitted(self.rows)
        is_upright = max(map(len, column_names), default=0) > _LEVEL
        most_names = 12 if self.numbers else 6
        if is_upright and wide:
            most_names = MOST_UPRIGHT
        row_height = 30
        if not has_cells:
            row_height = _FULL_ROWS * _FULL_HEIGHT // max(len(self.rows), 1)
            row_height = min(_FULL_HEIGHT, max(_LOWEST, row_height))
        says, table = of_cells(self.title, self.values, self.rows, self.columns)
        cells = list(self._cells(colours)) if has_cells else []
        values = {
            "map": self,
            "says": says,
            "height": max(len(self.rows) * row_height, 60),
            "named_rows": range(0, len(self.rows), math.ceil(_NAMES_APART / row_height)),
            "row_names": row_names,
            "column_names": column_names,
            "is_upright": is_upright,
            "stride": math.ceil(len(self.columns) / most_names) or 1,
            "image": colours.png(),
            "cells": cells,
            "digits": max((len(cell["text"]) for cell in cells), default=0),
        }
        body = rendered("heat.html", **values)
        starts = dict.fromkeys(filter(None, [column_start, row_start]))
        return Figure(
            self.title,
            body,
            note=self.note,
            wide=wide,
            scale=colours.scale,
            facts=tuple(self.facts),
            table=table,
            start=", ".join(starts),
            alone=partial(rendered, "heat.svg", **values, wide=wide, ends=colours.ends),
        )

    def _cells(self, colours: _Colours) -> Iterator[dict[str, str]]:
        """Of each cell its text, the page that it opens, and whether its colour is light or dark."""
        grounds = ["light" if is_light(*colour) else "dark" for colour in colours.table.tolist()]
        grounds.append("light")  # of a transparent cell
        places = product(self.rows, self.columns)
        shades = colours.index.ravel().clip(max=len(colours.table)).tolist()
        links = chain(chain.from_iterable(self.links), repeat(""))
        for (row, column), shade, value, link in zip(
            places, shades, self.values.ravel().tolist(), links, strict=False
        ):
            text = ""
            if self.numbers and not math.isnan(value):
                text = self.written(value)
            says = f"{printable(row)}, {printable(column)}: {self.written(value)}"
            yield {"ground": grounds[shade], "text": text, "link": link, "says": says}


def matrix(
    cells: Mapping[tuple[Any, Any], Any],
    rows: Sequence[Any],
    columns: Sequence[Any],
    otherwise: float = math.nan,
) -> Array:
    """[rows, columns] float32: the value of each (row, column), at most ±1e30; `otherwise` where there is none."""
    values = [cells.get(place, otherwise) for place in product(rows, columns)]
    limited = [max(min(value, 1e30), -1e30) for value in values]
    return np.array(limited, dtype=np.float32).reshape(len(rows), len(columns))


def shaded(values: Array) -> tuple[list[tuple[int, int, int]], Markup]:
    """The colour of each value [n], red, green and blue from 0 to 255, and their scale, as in a `HeatMap`."""
    colours = _colours(values[None], np.ones((1, len(values)), dtype=bool))
    return list(map(tuple, colours.table[colours.index[0]].tolist())), colours.scale


def encoded(
    values: Array,
    valid: Mask | None = None,
    *,
    limits: tuple[float, float] | None = None,
    centre: float | None = None,
) -> tuple[str, Markup]:
    """The data URL of a picture with one pixel for each value, and its scale; arguments as of a `HeatMap`."""
    colours = _colours(values, valid, limits=limits, centre=centre)
    return colours.png(), colours.scale


def is_light(red: int, green: int, blue: int) -> bool:
    """Whether letters on this colour, from 0 to 255, are to be dark."""
    return 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT


def worded(scale: Markup, low: str, high: str) -> Markup:
    """The scale with a text at each end."""
    return Markup('<span class="scale">{} {} {}</span>').format(low, scale, high)


@dataclass(frozen=True)
class _Colours:
    """The colours of a picture.

    index: the number of each pixel's colour [height, width]
    table: the colours [n, 3]
    ends:  what the colours mean: `low` and `high` as texts, `colours` between them, and those `beside` the scale
    """

    index: NDArray[np.uint8]
    table: NDArray[np.uint8]
    ends: Mapping[str, Any]

    @property
    def scale(self) -> Markup:
        """What the colours mean, for the page."""
        return rendered("scale.html", **self.ends)

    def png(self) -> str:
        """The data URL of the picture."""
        image = Image.frombytes("P", self.index.shape[::-1], self.index.tobytes())
        image.putpalette(self.table.tobytes() + bytes(3))
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True, transparency=_CLEAR)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _colours(
    values: Array,
    valid: Mask | None,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    centre: float | None = None,
) -> _Colours:
    """The colours of values [height, width].

    `centre` has the colour in the middle; unless it is given, zero has if there are values on both sides of it.
    """
    if valid is None:
        valid = np.isfinite(values)
    sheet = values.astype(np.float64)
    is_zero = np.zeros(values.shape, dtype=bool)
    if log:
        is_zero = (values == 0) & valid
        with np.errstate(invalid="ignore", divide="ignore"):
            sheet = np.log10(sheet)
    on_scale = np.isfinite(values) & valid & ~is_zero
    finite = sheet[on_scale]
    low, high = limits or _ends(finite)
    if centre is None and low < 0 < high and not log:
        centre = 0.0
    if centre is not None:
        reach = max(high - centre, centre - low)
        low = centre - reach
        high = centre + reach
    low_text = _scale_text(low, log)
    if finite.size and finite.min() < low:
        low_text = f"≤ {low_text}"
    high_text = _scale_text(high, log)
    if finite.size and finite.max() > high:
        high_text = f"≥ {high_text}"
    if high <= low:
        low -= 0.5
        high += 0.5
    masks = {"exactly 0": is_zero, "NaN": np.isnan(values) & valid, "infinite": np.isinf(values) & valid}
    beside = [name for name, mask in masks.items() if mask.any()]
    shades = LEVELS - len(beside)
    with np.errstate(over="ignore", invalid="ignore"):
        level = np.clip(np.nan_to_num((sheet - low) / (high - low)), 0, 1) * (shades - 1)
    index = np.where(on_scale, level.round(), _CLEAR).astype(np.uint8)
    table = _spaced(palette(diverging=centre is not None), shades)
    gradient = [_css(colour) for colour in _spaced(table, 9)]
    for byte, name in enumerate(beside, start=shades):
        index[masks[name]] = byte
        table = np.vstack([table, np.array(_BESIDE[name], np.uint8)])
    chips = [(_css(_BESIDE[name]), name) for name in beside]
    ends = {"low": low_text, "high": high_text, "colours": gradient, "beside": chips}
    return _Colours(index, table, ends)


def _scale_text(value: float, log: bool) -> str:
    if log:
        value = 10**value
    return tick(float(f"{value:.3g}"))


def _css(colour: Iterable[int]) -> str:
    red, green, blue = colour
    return f"rgb({red} {green} {blue})"


def _spaced(colours: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """`count` of the colours [n, 3], evenly spaced."""
    return colours[np.linspace(0, len(colours) - 1, count).round().astype(int)]


_VIRIDIS = """
440154 46085c 471063 481769 481d6f 482475 472a7a 46307e 453781 433d84 414287 3f4889 3d4e8a 3a538b 38598c 355e8d
33638d 31688e 2e6d8e 2c718e 2a768e 297b8e 27808e 25848e 23898e 218e8d 20928c 1f978b 1e9c89 1fa188 21a585 24aa83
28ae80 2eb37c 35b779 3dbc74 46c06f 50c46a 5ac864 65cb5e 70cf57 7cd250 89d548 95d840 a2da37 b0dd2f bddf26 cae11f
d8e219 e5e419 f1e51d fde725
"""
"""Every fifth of viridis' 256 colours, by Nathaniel Smith and Stéfan van der Walt (CC0)."""

_RED_BLUE = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
"""RdBu with 11 colours, reversed, by Cynthia Brewer (colorbrewer2.org, Apache-2.0)."""


@cache
def palette(*, diverging: bool) -> NDArray[np.uint8]:
    """`LEVELS` colours [LEVELS, 3] as red, green and blue from 0 to 255, from the smallest value to the largest.

    As matplotlib computes `viridis` and `RdBu_r`: a table of 256 colours, interpolated linearly between the given
    ones. `RdBu_r` is the same to the last bit, `viridis` within 1 of 255.
    """
    colours = bytes.fromhex(_RED_BLUE if diverging else _VIRIDIS)
    anchors = np.frombuffer(colours, np.uint8).reshape(-1, 3)
    places = np.linspace(0, 1, len(anchors))
    entries = np.minimum(np.linspace(0, 1, LEVELS) * 256, 255).astype(int) / 255
    channels = [np.interp(entries, places, channel) for channel in anchors.T]
    return np.stack(channels, axis=1).round().astype(np.uint8)

"""Arrays as pictures: inline PNG, one byte for each pixel."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from hookrun.report.draw.charts import Figure
from hookrun.report.draw.numbers import of_cells, of_tiles
from hookrun.report.draw.text import one_line, tick

Array = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

LEVELS = 255
"""Colours of a palette. A pixel is one byte, so one value is left for a pixel without a colour."""

MOST_PIXELS = 56
"""Largest width and height of a tile in pixels; larger ones are averaged down."""
MOST_PAGED_PIXELS = 28
"""The same for tiles that are shown on demand."""
MOST_PAGED = 3 * 2**20
"""Bytes of a page that pictures on demand may use."""
_BESIDE = {"exactly 0": (0x8A, 0x91, 0x99), "NaN": (0xFF, 0x2F, 0xD0), "infinite": (0xFF, 0x6A, 0x13)}
"""Values that have colours outside the scale."""
_CLEAR = LEVELS
"""The byte of a transparent pixel; the bytes just below it are values outside the scale, if a picture has any."""
_FULL_ROWS, _FULL_HEIGHT = 60, 13
"""Up to this number of rows, each has its name and this height in pixels; more rows are lower, only some with names."""
_NAMES_APART = 12
_LOWEST = 5
_MANY = 1000
"""From this number of values on, the scale of colours leaves out the most extreme half per cent at each end."""


class Room:
    """How many bytes a page has left for pictures that are shown on demand."""

    def __init__(self, left: int = MOST_PAGED) -> None:
        self.left = left

    def takes(self, size: int) -> bool:
        """Whether this many bytes are left; if so, they are subtracted."""
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


def mosaic(
    title: str,
    tiles: Array,
    *,
    rows: Sequence[str],
    columns: str,
    note: str = "",
    inputs: Sequence[str] = (),
    pages: int = 0,
    room: Room | None = None,
) -> Figure:
    """Tiles [rows, columns, height, width] beside each other, all on one scale of colours.

    NaN and infinities have colours of their own.

    inputs: for each row the URL of a picture of the sample, or ""
    pages:  how many columns are shown at a time; the others are shown on demand, smaller, if there is room; 0: all
    room:   the bytes that are left for columns on demand
    """
    pages = pages or tiles.shape[1]
    first = tiles[:, :pages]
    said = columns if tiles.shape[1] <= pages else f"{columns}s 0–{pages - 1} of {tiles.shape[1]}"
    says, table = of_tiles(title, first, rows, said)
    shown = np.stack([[_small(tile) for tile in row] for row in first])
    count = len(shown)
    limits = _ends(tiles if pages < tiles.shape[1] else shown)
    sheet, there = _sheet(shown)
    picture, scale = _coloured(sheet, title, "mosaic", there=there, limits=limits)
    further, left = _further(tiles, pages, columns, limits, room or Room(0))
    names = Markup("").join(
        Markup("<span>{}{}</span>").format(_input(inputs[n] if n < len(inputs) else ""), one_line(name))
        for n, name in enumerate(rows)
    )
    body = Markup(
        '<div class="sheet" role="img" aria-label="{}" style="--tiles-high:{}"><div class="sheet-rows">{}</div>{}</div>'
        '<div class="sheet-x"{}>{}</div>'
    ).format(one_line(says), count, names, picture, further, said)
    notes = [
        note,
        f"{left} of its {columns}s are left out, since the page would become too large" if left else "",
    ]
    return Figure(title, body, note="; ".join(filter(None, notes)), wide=True, scale=scale, table=table)


def _sheet(tiles: Array) -> tuple[Array, Mask]:
    """The tiles with a pixel between them, and which pixels are theirs."""
    count, across, height, width = tiles.shape
    sheet = np.full((count * (height + 1) - 1, across * (width + 1) - 1), np.nan, dtype=np.float32)
    there = np.zeros(sheet.shape, dtype=bool)
    for i in range(count):
        for j in range(across):
            top, left = i * (height + 1), j * (width + 1)
            sheet[top : top + height, left : left + width] = tiles[i, j]
            there[top : top + height, left : left + width] = True
    return sheet, there


def _further(
    tiles: Array, pages: int, columns: str, limits: tuple[float, float] | None, room: Room
) -> tuple[Markup, int]:
    """The pages after the first, as an HTML attribute, and the number of columns that do not fit."""
    total, found = tiles.shape[1], list[dict[str, str]]()
    for start in range(pages, total, pages):
        part = tiles[:, start : start + pages]
        sheet, there = _sheet(np.stack([[_small(tile, MOST_PAGED_PIXELS) for tile in row] for row in part]))
        index, table, _ = _indexed(sheet, limits=limits, there=there)
        address = _address(index, table)
        if not room.takes(len(address)):
            return _attribute(found), total - start
        end = min(start + pages, total) - 1
        found.append({"src": address, "says": f"{columns}s {start}–{end} of {total}"})
    return _attribute(found), 0


def _attribute(pages: Sequence[dict[str, str]]) -> Markup:
    return Markup(' data-pages="{}"').format(json.dumps(pages)) if pages else Markup("")


def _input(address: str) -> Markup:
    return Markup('<img class="input" alt="the input" src="{}">').format(address) if address else Markup("")


def _ends(values: Array) -> tuple[float, float] | None:
    """The ends of the scale that all pages share, as `_indexed` chooses them; None where nothing is finite."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = np.percentile(finite, (0.5, 99.5) if finite.size >= _MANY else (0, 100))
    return float(low), float(high)


def heat(
    title: str,
    values: Array,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    x: str,
    note: str = "",
    log: bool = False,
    numbers: bool = False,
    limits: tuple[float, float] | None = None,
    there: Mask | None = None,
    facts: Sequence[str] = (),
) -> Figure:
    """A matrix as coloured cells with names for its rows, and for some of its columns.

    log:     colours by magnitude, for values that are not negative; exactly 0 has a colour of its own
    numbers: write the values into the cells
    limits:  the ends of the scale; those of the values unless given
    there:   which cells hold a value: NaN and infinities among them have colours of their own; None: the finite ones
    facts:   texts about single rows, one line each
    """
    picture, scale = _coloured(values, title, "cells", log=log, limits=limits, there=there)
    stride = max(1, math.ceil(len(columns) / (12 if numbers else 6)))
    below = [columns[n] if n % stride == 0 else "" for n in range(len(columns))]
    cells = _numbers(values) if numbers else Markup("")
    row_height = 30 if numbers else _row_height(len(rows))
    every = math.ceil(_NAMES_APART / row_height)
    names = Markup("").join(
        Markup('<span style="grid-row:{}" title="{}">{}</span>').format(n + 1, one_line(name), one_line(name))
        for n, name in enumerate(rows)
        if n % every == 0
    )
    foot = Markup("").join(Markup("<span>{}</span>").format(one_line(name)) for name in below)
    height = max(len(rows) * row_height, 60)
    says, table = of_cells(title, values, rows, columns)
    body = Markup(
        '<div class="heat{}" role="img" aria-label="{}" style="--height:{}px;--rows:{};--columns:{}">'
        '<div class="heat-rows">{}</div>'
        '<div class="heat-plot">{}{}</div><div class="heat-columns">{}</div><div class="heat-x">{}</div></div>'
    ).format(
        " numbered" if numbers else "",
        one_line(says),
        height,
        len(rows),
        len(columns),
        names,
        picture,
        cells,
        foot,
        x,
    )
    wide = len(columns) > 30 or len(rows) > _FULL_ROWS or numbers
    return Figure(title, body, note=note, wide=wide, scale=scale, facts=tuple(facts), table=table)


def shaded(
    values: Array, limits: tuple[float, float] | None = None
) -> tuple[list[tuple[int, int, int]], Markup]:
    """The colour of each value [n], red, green and blue from 0 to 255, and their scale, as in `heat`."""
    index, table, scale = _indexed(values[None], limits=limits, there=np.ones((1, len(values)), dtype=bool))
    colours = [tuple(int(part) for part in table[each]) for each in index[0]]
    return [(red, green, blue) for red, green, blue in colours], scale


def cells_png(values: Array, limits: tuple[float, float], there: Mask) -> tuple[Markup, Markup]:
    """The data URL of a picture with one pixel for each value, transparent where `there` is false; and the scale."""
    index, table, scale = _indexed(np.where(there, values, np.nan), limits=limits, there=there)
    return Markup(_address(index, table)), scale


def worded(scale: Markup, low: str, high: str) -> Markup:
    """The scale with a text at each end."""
    return Markup('<span class="scale">{} {} {}</span>').format(low, scale, high)


def _row_height(rows: int) -> int:
    """Height of a row in pixels; it shrinks so that any number of rows can be drawn."""
    return max(_LOWEST, min(_FULL_HEIGHT, _FULL_ROWS * _FULL_HEIGHT // max(rows, 1)))


def _numbers(values: Array) -> Markup:
    """The values of a heat map, each readable on its colour; cells without a value stay empty."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    is_light = np.abs(values) < max(-low, high) / 2 if low < 0 < high else values > (low + high) / 2
    cells = "".join(  # numbers alone: nothing to escape
        f'<span class="on-{"light" if light else "dark"}">{"" if np.isnan(value) else f"{value:.3g}"}</span>'
        for value, light in zip(values.ravel(), is_light.ravel(), strict=True)
    )
    return Markup('<div class="cell-numbers">{}</div>').format(Markup(cells))


def _coloured(
    values: Array,
    title: str,
    kind: str,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    there: Mask | None = None,
) -> tuple[Markup, Markup]:
    """The picture and its scale. Where there are negative values, zero has the colour in the middle.

    there: which pixels hold a value; None: those that are finite
    """
    index, table, scale = _indexed(values, log=log, limits=limits, there=there)
    picture = Markup('<img class="{}" alt="{}" src="{}">').format(
        kind, one_line(title), _address(index, table)
    )
    return picture, scale


def _address(index: NDArray[np.uint8], table: NDArray[np.uint8]) -> str:
    """A picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(_png(index, table)).decode('ascii')}"


def _indexed(
    values: Array,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    there: Mask | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Markup]:
    """The number of each pixel's colour [height, width], the colours [n, 3], and their scale."""
    is_zero = (values == 0) if log else np.zeros(values.shape, dtype=bool)
    on_scale = np.isfinite(values) & ~is_zero
    with np.errstate(invalid="ignore", divide="ignore"):
        sheet = np.log10(values.astype(np.float64)) if log else values.astype(np.float64)
    finite = sheet[on_scale]
    ends = (0.5, 99.5) if finite.size >= _MANY else (0, 100)
    low, high = (float(v) for v in np.percentile(finite, ends)) if finite.size else (0.0, 1.0)
    low, high = limits or (low, high)
    diverging = low < 0 < high and not log
    if diverging:
        high = max(-low, high)
        low = -high
    said = [tick(float(f"{10**v if log else v:.3g}")) for v in (low, high)]
    if finite.size and finite.min() < low:
        said[0] = f"≤ {said[0]}"
    if finite.size and finite.max() > high:
        said[1] = f"≥ {said[1]}"
    if high <= low:
        low, high = low - 0.5, high + 0.5
    held = there if there is not None else np.isfinite(values)
    masks = is_zero & held, np.isnan(values) & held, np.isinf(values) & held
    beside = {name: mask for name, mask in zip(_BESIDE, masks, strict=True) if mask.any()}
    shades = LEVELS - len(beside)
    with np.errstate(invalid="ignore"):
        level = np.clip(np.nan_to_num((sheet - low) / (high - low)), 0, 1) * (shades - 1)
    index = np.where(on_scale, level.round(), _CLEAR).astype(np.uint8)
    for byte, mask in enumerate(beside.values(), start=shades):
        index[mask] = byte
    colours = _some(palette(diverging=diverging), shades)
    table = np.concatenate(
        [colours, np.array([_BESIDE[name] for name in beside] or np.empty((0, 3)), np.uint8)]
    )
    stops = ", ".join(f"rgb({r} {g} {b})" for r, g, b in _some(colours, 9))
    scale = Markup(
        '<span class="scale"><span>{}</span><i style="background:linear-gradient(90deg, {})"></i>{}{}</span>'
    )
    end = Markup("<span>{}</span>").format(said[1])
    return index, table, scale.format(said[0], stops, end, Markup("").join(map(_chip, beside)))


def _some(colours: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """`count` of the colours [n, 3], evenly spaced."""
    found: NDArray[np.uint8] = colours[np.linspace(0, len(colours) - 1, count).round().astype(int)]
    return found


def _chip(name: str) -> Markup:
    """A colour outside the scale, with its meaning."""
    red, green, blue = _BESIDE[name]
    return Markup('<b style="background:rgb({} {} {})"></b><span>{}</span>').format(red, green, blue, name)


def _png(index: NDArray[np.uint8], colours: NDArray[np.uint8]) -> bytes:
    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette(colours.tobytes() + bytes(3))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, transparency=_CLEAR)
    return file.getvalue()


def _small(tile: Array, most: int = MOST_PIXELS) -> Array:
    """The tile with sides of at most `most` pixels, each pixel the mean of a block."""
    block = [-(-side // most) for side in tile.shape]
    if max(block) < 2:
        return tile
    averaged: Array = functional.avg_pool2d(torch.from_numpy(tile)[None], block, ceil_mode=True)[0].numpy()
    return averaged


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
    text = _RED_BLUE if diverging else _VIRIDIS
    anchors = np.array([list(bytes.fromhex(colour)) for colour in text.split()])
    places = np.linspace(0, 1, len(anchors))
    entries = np.minimum(np.linspace(0, 1, LEVELS) * 256, 255).astype(int) / 255
    channels = [np.interp(entries, places, channel) for channel in anchors.T]
    return np.stack(channels, axis=1).round().astype(np.uint8)

"""Arrays as pictures: inline PNG, one byte for each pixel."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, zip_longest
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
_FULL_ROWS, _FULL_HEIGHT = 60, 13
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
) -> Figure:
    """Tiles [rows, columns, height, width] beside each other, all on one scale of colours.

    NaN and infinities have colours of their own.

    inputs: for each row the URL of a picture of the sample, or ""
    pages:  how many columns are shown at a time; the others are shown on demand, smaller, if there is room; 0: all
    room:   how many bytes the columns on demand may take
    """
    across = tiles.shape[1]
    pages = pages or across
    said = columns if across <= pages else f"{columns}s 0–{pages - 1} of {across}"
    says, table = of_tiles(title, tiles[:, :pages], rows, said)
    limits = _ends(tiles[np.isfinite(tiles)]) if pages < across else None
    address, scale = encoded(*_sheet(tiles[:, :pages], MOST_PIXELS), limits=limits)
    further, notes = list[dict[str, str]](), [note] if note else []
    for start in range(pages, across, pages):
        later, _ = encoded(*_sheet(tiles[:, start : start + pages], MOST_PAGED_PIXELS), limits=limits)
        room -= len(later)
        if room < 0:
            notes.append(
                f"{across - start} of its {columns}s are left out, since the page would become too large"
            )
            break
        last = min(start + pages, across) - 1
        further.append({"src": later, "says": f"{columns}s {start}–{last} of {across}"})
    image = Markup('<img class="input" alt="the input" src="{}">')
    names = Markup("").join(
        Markup("<span>{}{}</span>").format(image.format(input_) if input_ else "", printable(name))
        for name, input_ in zip_longest(rows, inputs, fillvalue="")
    )
    body = Markup(
        '<div class="sheet" role="img" aria-label="{}" style="--tiles-high:{}"><div class="sheet-rows">{}</div>'
        '<img class="mosaic" alt="{}" src="{}"></div><div class="sheet-x"{}>{}</div>'
    ).format(
        printable(says),
        len(tiles),
        names,
        printable(title),
        address,
        Markup(' data-pages="{}"').format(json.dumps(further)) if further else "",
        said,
    )
    return Figure(title, body, note="; ".join(notes), wide=True, scale=scale, table=table)


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
    sheet = np.pad(tiles, gaps).swapaxes(1, 2).reshape(size)[:-1, :-1]
    there = np.pad(np.ones(tiles.shape, dtype=bool), gaps).swapaxes(1, 2).reshape(size)[:-1, :-1]
    return sheet, there


def _ends(finite: Array) -> tuple[float, float]:
    """The ends of the scale of these values."""
    if not finite.size:
        return 0.0, 1.0
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
    facts: Iterable[str] = (),
    centre: float | None = None,
    links: Sequence[Sequence[str]] = (),
) -> Figure:
    """A matrix as coloured cells with names for its rows, and for its columns, or some of many.

    log:     colours by magnitude, for values that are not negative; exactly 0 has a colour of its own
    numbers: write the values into the cells
    limits:  the ends of the scale; those of the values unless given
    there:   which cells hold a value: NaN and infinities among them have colours of their own; None: the finite ones
    facts:   texts about single rows, one line each
    centre:  the value of the colour in the middle; 0 for values on both sides of it
    links:   for each cell the address of the page that a click opens, or ""
    """
    index, table, scale = _indexed(values, log=log, limits=limits, there=there, centre=centre)
    has_cells = numbers or bool(links)
    wide = len(columns) > 30 or len(rows) > _FULL_ROWS or has_cells
    starts, (below, beside) = zip(*(fitted(names) for names in (columns, rows)), strict=True)
    is_upright = max(map(len, below), default=0) > _LEVEL
    stride = math.ceil(len(columns) / (MOST_UPRIGHT if is_upright and wide else 12 if numbers else 6)) or 1
    shades = [is_light(*colour) for colour in table.tolist()] + [True]
    cells = [
        Markup('<span class="on-{}">{}</span>').format(
            "light" if shades[shade] else "dark", number(value) if numbers and value == value else ""
        )
        for shade, value in zip(index.ravel().clip(max=len(table)), values.ravel().tolist(), strict=True)
        if has_cells
    ]
    for at, address in enumerate(chain.from_iterable(links)):
        if address:
            row, column = divmod(at, len(columns))
            said = printable(rows[row]), printable(columns[column]), number(float(values[row, column]))
            cells[at] = Markup('<a href="{}" title="{}, {}: {}">{}</a>').format(address, *said, cells[at])
    overlay = Markup('<div class="cell-numbers">{}</div>').format(Markup("").join(cells)) if cells else ""
    height = max(_LOWEST, _FULL_ROWS * _FULL_HEIGHT // max(len(rows), 1))
    row_height = 30 if has_cells else min(_FULL_HEIGHT, height)
    names = Markup("").join(
        Markup('<span style="grid-row:{}" title="{}">{}</span>').format(n + 1, printable(rows[n]), beside[n])
        for n in range(0, len(rows), math.ceil(_NAMES_APART / row_height))
    )
    foot = Markup("").join(
        Markup("<span>{}</span>").format("" if n % stride else name) for n, name in enumerate(below)
    )
    says, numbered = of_cells(title, values, rows, columns)
    body = Markup(
        '<div class="heat{}" role="{}" aria-label="{}" style="--height:{}px;--rows:{};--columns:{}">'
        '<div class="heat-rows">{}</div>'
        '<div class="heat-plot"><img class="cells" alt="{}" src="{}">{}</div>'
        '<div class="heat-columns{}">{}</div><div class="heat-x">{}</div></div>'
    ).format(
        " numbered" if numbers else " linked" if links else "",
        "group" if links else "img",
        printable(says),
        max(len(rows) * row_height, 60),
        len(rows),
        len(columns),
        names,
        printable(title),
        _png(index, table),
        overlay,
        " upright" if is_upright else "",
        foot,
        x,
    )
    return Figure(
        title,
        body,
        note=note,
        wide=wide,
        scale=scale,
        facts=tuple(facts),
        table=numbered,
        start=", ".join(dict.fromkeys(filter(None, starts))),
    )


def matrix(
    cells: Mapping[tuple[Any, Any], Any],
    rows: Sequence[Any],
    columns: Sequence[Any],
    otherwise: float = math.nan,
) -> Array:
    """[rows, columns] float32: the value of each (row, column), at most ±1e30; `otherwise` where there is none."""
    return np.array(
        [[max(min(cells.get((row, column), otherwise), 1e30), -1e30) for column in columns] for row in rows],
        dtype=np.float32,
    )


def shaded(values: Array) -> tuple[list[tuple[int, int, int]], Markup]:
    """The colour of each value [n], red, green and blue from 0 to 255, and their scale, as in `heat`."""
    index, table, scale = _indexed(values[None], there=np.ones((1, len(values)), dtype=bool))
    return [(red, green, blue) for red, green, blue in table[index[0]].tolist()], scale


def encoded(
    values: Array,
    there: Mask | None = None,
    *,
    limits: tuple[float, float] | None = None,
    centre: float | None = None,
) -> tuple[str, Markup]:
    """The data URL of a picture with one pixel for each value, and its scale; arguments as of `heat`."""
    index, table, scale = _indexed(values, limits=limits, there=there, centre=centre)
    return _png(index, table), scale


def _png(index: NDArray[np.uint8], table: NDArray[np.uint8]) -> str:
    """The data URL of a picture of colours by number, as `_indexed` gives them."""
    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette(table.tobytes() + bytes(3))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, transparency=_CLEAR)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def is_light(red: int, green: int, blue: int) -> bool:
    """Whether letters on this colour, from 0 to 255, are to be dark."""
    return 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT


def worded(scale: Markup, low: str, high: str) -> Markup:
    """The scale with a text at each end."""
    return Markup('<span class="scale">{} {} {}</span>').format(low, scale, high)


def _indexed(
    values: Array,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    there: Mask | None = None,
    centre: float | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Markup]:
    """The number of each pixel's colour [height, width], the colours [n, 3], and their scale.

    `centre` has the colour in the middle; unless it is given, zero has if there are values on both sides of it.
    """
    there = np.isfinite(values) if there is None else there
    is_zero = (values == 0) & there if log else np.zeros(values.shape, dtype=bool)
    on_scale = np.isfinite(values) & there & ~is_zero
    with np.errstate(invalid="ignore", divide="ignore"):
        sheet = np.log10(values.astype(np.float64)) if log else values.astype(np.float64)
    finite = sheet[on_scale]
    low, high = limits or _ends(finite)
    if centre is None and low < 0 < high and not log:
        centre = 0.0
    if centre is not None:
        reach = max(high - centre, centre - low)
        low, high = centre - reach, centre + reach
    said = [tick(float(f"{10**v if log else v:.3g}")) for v in (low, high)]
    if finite.size and finite.min() < low:
        said[0] = f"≤ {said[0]}"
    if finite.size and finite.max() > high:
        said[1] = f"≥ {said[1]}"
    if high <= low:
        low, high = low - 0.5, high + 0.5
    beside = {"exactly 0": is_zero, "NaN": np.isnan(values) & there, "infinite": np.isinf(values) & there}
    beside = {name: mask for name, mask in beside.items() if mask.any()}
    shades = LEVELS - len(beside)
    with np.errstate(invalid="ignore"):
        level = np.clip(np.nan_to_num((sheet - low) / (high - low)), 0, 1) * (shades - 1)
    index = np.where(on_scale, level.round(), _CLEAR).astype(np.uint8)
    for byte, mask in enumerate(beside.values(), start=shades):
        index[mask] = byte
    colours = _some(palette(diverging=centre is not None), shades)
    table = np.concatenate(
        [colours, np.array([_BESIDE[name] for name in beside] or np.empty((0, 3)), np.uint8)]
    )
    chip = Markup('<b style="background:rgb({} {} {})"></b><span>{}</span>')
    scale = Markup(
        '<span class="scale"><span>{}</span><i style="background:linear-gradient(90deg, {})"></i>'
        "<span>{}</span>{}</span>"
    ).format(
        said[0],
        ", ".join(f"rgb({r} {g} {b})" for r, g, b in _some(colours, 9)),
        said[1],
        Markup("").join(chip.format(*_BESIDE[name], name) for name in beside),
    )
    return index, table, scale


def _some(colours: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
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
    colours = (_RED_BLUE if diverging else _VIRIDIS).split()
    anchors = np.array([list(bytes.fromhex(colour)) for colour in colours])
    places = np.linspace(0, 1, len(anchors))
    entries = np.minimum(np.linspace(0, 1, LEVELS) * 256, 255).astype(int) / 255
    channels = [np.interp(entries, places, channel) for channel in anchors.T]
    return np.stack(channels, axis=1).round().astype(np.uint8)

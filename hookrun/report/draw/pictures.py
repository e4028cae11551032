"""Arrays as pictures: inline PNG, one byte for each pixel."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
import torch
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from hookrun.report.draw.charts import Figure
from hookrun.report.draw.palettes import LEVELS, palette
from hookrun.report.draw.text import one_line, tick

Array = NDArray[np.float32]

MOST_PIXELS = 56
"""A side of a tile; larger ones are averaged down."""
_CLEAR = LEVELS  # the byte of a pixel without a colour
_LABELS = 26
_MANY = 1000
"""From so many values on, the scale of colours leaves out the furthest half per cent to each side."""


def mosaic(title: str, tiles: Array, *, rows: Sequence[str], columns: str, note: str = "") -> Figure:
    """Tiles [rows, columns, height, width] beside each other, all on one scale of colours."""
    tiles = np.stack([[_small(tile) for tile in row] for row in tiles])
    count, across, height, width = tiles.shape
    sheet = np.full((count * (height + 1) - 1, across * (width + 1) - 1), np.nan, dtype=np.float32)
    for i in range(count):
        for j in range(across):
            top, left = i * (height + 1), j * (width + 1)
            sheet[top : top + height, left : left + width] = tiles[i, j]
    picture, scale = _coloured(sheet, tiles, title, "mosaic")
    names = Markup("").join(Markup("<span>{}</span>").format(one_line(name)) for name in rows)
    body = Markup(
        '<div class="sheet" style="--tiles-high:{}"><div class="sheet-rows">{}</div>{}</div>'
        '<div class="sheet-x">{}</div>'
    ).format(count, names, picture, columns)
    return Figure(title, body, note=note, wide=True, scale=scale)


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
) -> Figure:
    """A matrix as coloured cells with names for its rows, and for some of its columns.

    log:     colours by magnitude; what is not positive stays empty
    numbers: write the values into the cells
    limits:  the ends of the scale; those of the values unless given
    """
    shown = (
        np.where(values > 0, np.log10(np.maximum(values, 1e-38)), np.nan).astype(np.float32)
        if log
        else values
    )
    picture, scale = _coloured(shown, shown, title, "cells", log=log, limits=limits)
    stride = max(1, math.ceil(len(columns) / (12 if numbers else 6)))
    below = [columns[n] if n % stride == 0 else "" for n in range(len(columns))]
    cells = _numbers(values) if numbers else Markup("")
    every = 1 if numbers else math.ceil(len(rows) / _LABELS)
    names = Markup("").join(
        Markup('<span style="grid-row:{}" title="{}">{}</span>').format(n + 1, one_line(name), one_line(name))
        for n, name in enumerate(rows)
        if n % every == 0
    )
    foot = Markup("").join(Markup("<span>{}</span>").format(one_line(name)) for name in below)
    height = max(min(len(rows), 40) * (30 if numbers else 15 if every == 1 else 9), 60)
    body = Markup(
        '<div class="heat{}" style="--height:{}px;--rows:{};--columns:{}"><div class="heat-rows">{}</div>'
        '<div class="heat-plot">{}{}</div><div class="heat-columns">{}</div><div class="heat-x">{}</div></div>'
    ).format(" numbered" if numbers else "", height, len(rows), len(columns), names, picture, cells, foot, x)
    return Figure(title, body, note=note, wide=len(columns) > 30 or numbers, scale=scale)


def _numbers(values: Array) -> Markup:
    """The values of a heat map, each readable on its colour; cells without a value stay empty."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    is_light = np.abs(values) < max(-low, high) / 2 if low < 0 < high else values > (low + high) / 2
    cells = (
        Markup('<span class="{}">{}</span>').format(
            "on-light" if light else "on-dark", "" if np.isnan(value) else f"{value:.3g}"
        )
        for value, light in zip(values.ravel(), is_light.ravel(), strict=True)
    )
    return Markup('<div class="cell-numbers">{}</div>').format(Markup("").join(cells))


def _coloured(
    sheet: Array,
    values: Array,
    title: str,
    kind: str,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> tuple[Markup, Markup]:
    """The picture and its scale. Where there are negative values, zero has the colour in the middle."""
    finite = values[np.isfinite(values)]
    ends = (0.5, 99.5) if finite.size >= _MANY else (0, 100)
    low, high = (float(v) for v in np.percentile(finite, ends)) if finite.size else (0.0, 1.0)
    low, high = limits or (low, high)
    diverging = low < 0 < high and not log
    if diverging:
        high = max(-low, high)
        low = -high
    said = [tick(float(f"{10**v if log else v:.3g}")) for v in (low, high)]
    if high <= low:
        low, high = low - 0.5, high + 0.5
    with np.errstate(invalid="ignore"):
        level = np.clip(np.nan_to_num((sheet - low) / (high - low)), 0, 1) * (LEVELS - 1)
    index = np.where(np.isfinite(sheet), level.round(), _CLEAR).astype(np.uint8)
    colours = palette(diverging=diverging)
    data = base64.b64encode(_png(index, colours)).decode("ascii")
    picture = Markup('<img class="{}" alt="{}" src="data:image/png;base64,{}">').format(
        kind, one_line(title), data
    )
    stops = ", ".join(f"rgb({r} {g} {b})" for r, g, b in colours[:: (LEVELS - 1) // 8])
    scale = Markup(
        '<span class="scale"><span>{}</span><i style="background:linear-gradient(90deg, {})"></i>{}</span>'
    )
    return picture, scale.format(said[0], stops, Markup("<span>{}</span>").format(escape(said[1])))


def _png(index: NDArray[np.uint8], colours: NDArray[np.uint8]) -> bytes:
    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette(colours.tobytes() + bytes(3))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, transparency=_CLEAR)
    return file.getvalue()


def _small(tile: Array) -> Array:
    """The tile with sides of at most `MOST_PIXELS`, each pixel the mean of a block."""
    block = [-(-side // MOST_PIXELS) for side in tile.shape]
    if max(block) < 2:
        return tile
    averaged: Array = functional.avg_pool2d(torch.from_numpy(tile)[None], block, ceil_mode=True)[0].numpy()
    return averaged

"""Captured tensors as pictures: histograms, grids of images, bars, maps, and distributions over steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hookrun.errors import HookrunError, counted
from hookrun.report.draw.charts import Figure, Series, bars, histogram, lines, spans_magnitudes
from hookrun.report.draw.pictures import MOST_PAGED, HeatMap, mosaic
from hookrun.report.draw.text import number
from hookrun.report.facts import RunData
from hookrun.report.sampling import DrawnRows, Summary, draw, summary
from hookrun.report.token_pictures import attention_of, is_attention, strips_of_capture, strips_of_predictions
from hookrun.store.captures.read import StoredCapture, spread

MOST_VIEWS = 40
"""Captured tensors that are drawn, not counting predictions; the others are listed."""

BINS = 48
MOST_BARS = 64
MOST_TILES = 12
MOST_IMAGES = 4
MOST_CHANNELS = 2_048
MOST_LINES = 256
MOST_MATRICES = 8
MOST_VECTORS = 48
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class CaptureView:
    """The pictures of one captured tensor.

    heads:   pictures of attention patterns, as of `attention_of`
    units:   idle units, as of `idle_units`
    problem: why there are no pictures
    value:   its value, if it has a single element
    rows:    how many rows were drawn
    of_tokens: whether each row is of one token
    norms:   steps and norms of the firings, for gradients
    """

    capture: StoredCapture
    heads: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    units: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    value: str = ""
    rows: int = 0
    of_tokens: bool = False
    norms: tuple[list[float], list[float]] | None = None


def place(capture: StoredCapture) -> str:
    """The module, with the tensor's place in a container."""
    return f"{capture.module} {capture.path}".rstrip() if capture.path else capture.module


def view_capture(capture: StoredCapture, facts: RunData, *, is_prediction: bool = False) -> CaptureView:
    """The pictures of a captured tensor; if it cannot be drawn, the view's `problem` says why."""
    view = CaptureView(capture)
    try:
        sample = draw(capture)
        statistics = summary(capture, sample)
        strips = strips_of_predictions(capture, facts) if is_prediction else strips_of_capture(capture, facts)
        view.heads = list(attention_of(capture, facts))
    except (HookrunError, OSError) as error:
        view.problem = str(error)
        return view
    values = sample.values
    finite = values[values.isfinite()]
    if not len(finite):
        view.problem = "none of its values is finite" if values.numel() else "it has no elements"
        return view
    view.rows = len(values)
    view.of_tokens = sample.by_token
    if values.numel() == 1:
        view.value = number(values.item())
        return view
    is_forward = not facts.sees_gradients(capture.hook)
    view.figures += [*strips, _histogram(finite, statistics, len(capture))]
    if not view.heads and not (strips and (is_prediction or values[0].numel() == 1)):
        view.figures += _pictures(sample, capture, "activation" if is_forward else "gradient", facts)
    view.figures += _over_steps(sample)
    if is_forward and capture.is_by_sample and not view.heads:
        view.units = idle_units(values, facts.classes.get(capture.module, ""))
    if not is_forward and not capture.is_by_sample and len(values) > 1:
        norms = torch.linalg.vector_norm(values.flatten(1), dim=1)
        view.norms = sample.source.steps.float().tolist(), norms.tolist()
    return view


def _histogram(values: Tensor, statistics: Summary, rows: int) -> Figure:
    """A histogram of finite values [n], with statistics of the whole capture.

    If many are exactly 0, they are not drawn, since they would flatten the rest; the note says how many.
    """
    array = values.double().numpy()
    note = (
        f"mean {statistics.mean:.4g}, std {statistics.std:.4g}, min {number(statistics.low)}, "
        f"max {number(statistics.high)}, {statistics.count:,} values"
    )
    if statistics.rows < rows:
        note += f" of {statistics.rows:,} of {counted(rows, 'row')}"
    if statistics.finite < statistics.count:
        lost = statistics.count - statistics.finite
        note += f"; {lost:,} of {statistics.count:,} values are not finite"
    others = array[array != 0]
    zeros = statistics.zeros / max(statistics.finite, 1)
    if zeros >= 0.1 and len(others) and others.min() < others.max():
        note += f"; {zeros:.0%} are exactly 0 and not drawn"
        array = others
    start = float(array.min())
    end = float(array.max())
    if start == end:
        half = abs(start) * 0.5 or 0.5
        start -= half
        end += half
    counts, edges = np.histogram(array, bins=BINS, range=(start, end))
    return histogram("distribution", counts.tolist(), edges.tolist(), note=note)


def _pictures(sample: DrawnRows, capture: StoredCapture, kind: str, facts: RunData) -> Iterator[Figure]:
    """Pictures of the rows by their shape: points of numbers, bars or a line of vectors, matrices, images."""
    shape = list(sample.values.shape[1:])
    dims = shape
    if not capture.is_by_sample:
        dims = [length for length in shape if length > 1]
    match dims:
        case [] | [1]:
            yield _points(sample)
        case [_]:
            yield from _vectors(sample, facts)
        case [height, width]:  # such as attention patterns
            tiles = sample.values.reshape(-1, height, width)
            title = "maps"
            # A matrix that is not square may be a distribution over classes for each token.
            if capture.is_by_sample and height == width and is_attention(tiles):
                title = "attention maps"
            rows = spread(range(len(tiles)), MOST_MATRICES)
            yield mosaic(
                title,
                tiles[rows].numpy()[None],
                rows=["matrix"],
                columns=", ".join(_names(sample, rows, facts)),
                note=f"each {height} × {width}",
            )
        case [*first, height, width]:
            tiles = sample.values.reshape(-1, math.prod(first), height, width)
            if len(shape) > 3:
                kind = ""
            yield _images(sample, tiles, kind, facts)


def _points(sample: DrawnRows) -> Figure:
    """Rows of one number: a point for each sample, or a line over the steps."""
    of_samples = bool((sample.source.sample_ids >= 0).all())
    axis = "sample" if of_samples else "step"
    places = sample.source.sample_ids if of_samples else sample.source.steps
    places, order = places.float().sort(stable=True)
    values = sample.values.reshape(-1)[order]
    series = Series("value", places.tolist(), values.tolist(), dots=of_samples)
    return lines("value", [series], x=axis, y="value")


def _names(sample: DrawnRows, rows: list[int], facts: RunData) -> list[str]:
    """Captions of rows: sample, file and class, or the step; also split and epoch if there are several."""
    source = sample.source
    places = torch.stack([source.sample_ids, source.positions], 1)
    by_epoch = len(places.unique(dim=0)) < len(places) and len(source.epochs.unique()) > 1
    by_split = len(source.split_numbers.unique()) > 1
    names: list[str] = []
    for row in rows:
        split, number = sample.sample_of(row)
        if number < 0:
            names.append(f"step {source.steps[row]}")
            continue
        name = f"sample {number}"
        if source.positions[row] >= 0:
            name += f" at {source.positions[row]}"
        if by_split and split:
            name += f" of {split}"
        if by_epoch:
            name += f", epoch {int(source.epochs[row]) + 1}"
        called = facts.called.get((split, number))
        if called:
            name += f" · {called}"
        names.append(name)
    return names


def _images(sample: DrawnRows, tiles: Tensor, what: str, facts: RunData) -> Figure:
    """A grid of images, a row for each sample; columns are channels, attention heads, or slices if `what` is empty."""
    rows = spread(range(len(tiles)), MOST_IMAGES)
    count = tiles.shape[1]
    title = "slices"
    kind = "slice"
    note = f"each {tiles.shape[2]} × {tiles.shape[3]}"
    if what and is_attention(tiles):
        title = "attention maps"
        kind = "head"
        note += ": a row for each query"
    elif what:
        title = f"{what} maps"
        kind = "channel"
    if count > MOST_CHANNELS:
        note += f"; the first {MOST_CHANNELS:,} of {count:,}"
    columns = f"{kind}s 0–{count - 1}"
    if count == 1:
        columns = f"its one {kind}"
    elif count > MOST_TILES:
        columns = kind
    return mosaic(
        title,
        tiles[rows, :MOST_CHANNELS].numpy(),
        rows=_names(sample, rows, facts),
        columns=columns,
        note=note,
        inputs=[facts.pictures.get(sample.sample_of(row), "") for row in rows],
        pages=MOST_TILES,
        room=MOST_PAGED // max(min(len(facts.captured), MOST_VIEWS), 1),
    )


def _vectors(sample: DrawnRows, facts: RunData) -> Iterator[Figure]:
    """The mean of rows that are vectors, as bars or as a line, and some rows as a map."""
    rows = sample.values.flatten(1)
    count, length = rows.shape
    stride = -(-length // MOST_LINES)
    elements = range(0, length, stride)
    mean = rows.mean(0)
    title = "the one row"
    y = "value"
    deviation = torch.zeros(length)
    if count > 1:
        title = f"mean of {counted(count, 'row')}"
        y = "mean"
        deviation = rows.std(0)
    if length <= MOST_BARS and count > 1:
        note = "whiskers: one standard deviation"
        yield bars(title, mean.tolist(), x="element", y=y, spread=deviation.tolist(), note=note)
    elif length <= MOST_BARS:
        yield bars(title, mean.tolist(), x="element", y=y)
    else:
        low = (mean - deviation)[::stride].tolist()
        high = (mean + deviation)[::stride].tolist()
        band = Series("mean", elements, mean[::stride].tolist(), low, high)
        note = "band: one standard deviation"
        if stride > 1:
            note += f"; every {stride}th element"
        yield lines(title, [band], x="element", y=y, note=note)
    if count > 1 and length > 1:
        some = spread(range(count), MOST_VECTORS)
        matrix = rows[some][:, ::stride].numpy()
        kind = "step"
        if sample.source.sample_ids[0] >= 0:
            kind = "token" if sample.source.positions[0] >= 0 else "sample"
        yield HeatMap(
            "rows",
            matrix,
            rows=_names(sample, some, facts),
            columns=list(map(str, elements)),
            x="element",
            note=f"a line for each {kind}",
            valid=np.ones(matrix.shape, dtype=bool),
        ).figure()


def _over_steps(sample: DrawnRows) -> Iterator[Figure]:
    """The distribution over steps, if rows come from several; over the order of recording if steps restart."""
    source = sample.source
    places = torch.stack([source.split_numbers, source.sample_ids, source.positions], dim=1)
    if (source.sample_ids >= 0).all() and len(places.unique(dim=0)) == len(places):
        return  # one row for each sample, or each of its tokens: steps are only batches
    x = "step"
    clock = source.steps
    if (clock.diff() < 0).any():
        x = "in the order of recording"
        begins = (clock.diff() != 0) | (source.epochs.diff() != 0)
        clock = functional.pad(begins.cumsum(0), (1, 0))
    times = clock.unique()
    if len(times) < 4 or len(sample.values[0].reshape(-1)) < 2:
        return
    rows = [_quantiles(sample.values[clock == time].flatten()) for time in times]
    low, quarter, middle, three, high = torch.stack(rows, dim=1).tolist()
    xs = times.double().tolist()
    series = [Series("5–95 %", xs, middle, low, high), Series("25–75 %", xs, middle, quarter, three)]
    log = spans_magnitudes([*low, *high], 1000)
    yield lines("distribution over steps", series, x=x, y="value", log=log, note="line: the median")


def _quantiles(values: Tensor) -> Tensor:
    """`_QUANTILES` of the finite ones of the values [n], or of some of many; NaN if there are none."""
    values = values[values.isfinite()]
    if not len(values):
        values = torch.full((1,), math.nan)
    stride = -(-len(values) // 50_000)
    return torch.quantile(values[::stride], torch.tensor(_QUANTILES))


# Class -> the ends of its range.
_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "ReLU6": (None, 6.0),  # at 0 it is inactive, not saturated
}
_NEAR = 0.01
_OFTEN = 0.95
_FEWEST_ROWS = 8


def idle_units(rows: Tensor, module_class: str) -> list[dict[str, Any]]:
    """The idle units of rows [rows, ...]: channels of images, else elements of the last dimension.

    Empty for fewer than 8 rows, which are not enough to tell. Saturation is tested if the class has a bounded range.

    what:    ``dead``, ``saturated`` or ``constant``
    meaning: how that was measured
    which:   their indices, among `total`
    kind:    ``unit`` or ``channel``
    """
    count = len(rows)
    if count < _FEWEST_ROWS or rows.dim() < 2 or not rows.numel():
        return []
    kind = "unit"
    if rows.dim() == 4:
        kind = "channel"
        rows = rows.movedim(1, -1)
    by_unit = rows.flatten(0, -2)
    examined = f"in the {count} rows examined"
    low = by_unit.amin(0)
    high = by_unit.amax(0)
    dead = (low == 0) & (high == 0)
    masks = [("dead", f"exactly 0 {examined}", dead)]
    if module_class in _RANGES:
        meaning = f"within 1 % of a bound of the range in {_OFTEN:.0%} of the values {examined}"
        masks.append(("saturated", meaning, _saturated(by_unit, *_RANGES[module_class])))
    masks.append(("constant", f"the same value {examined}", (low == high) & ~dead))
    units: list[dict[str, Any]] = []
    for what, meaning, mask in masks:
        which = mask.nonzero().flatten().tolist()
        if which:
            units.append({"what": what, "meaning": meaning, "which": which, "total": len(mask), "kind": kind})
    return units


def _saturated(by_unit: Tensor, low: float | None, high: float) -> Tensor:
    """[units] bool: whether nearly all values [n, units] are near a bound of the range."""
    margin = _NEAR * (high - (low or 0.0))
    near = by_unit >= high - margin
    if low is not None:
        near |= by_unit <= low + margin
    return near.float().mean(0) >= _OFTEN

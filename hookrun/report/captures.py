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
from hookrun.report.facts import Facts
from hookrun.report.sampling import CapturedRows, Summary, draw, summary
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


def view_capture(capture: StoredCapture, facts: Facts, *, is_prediction: bool = False) -> CaptureView:
    """The pictures of a captured tensor; if it cannot be drawn, the view's `problem` says why."""
    view = CaptureView(capture)
    try:
        sample = draw(capture)
        statistics = summary(capture, sample)
        of_tokens = (strips_of_predictions if is_prediction else strips_of_capture)(capture, facts)
        view.heads = list(attention_of(capture, facts))
    except (HookrunError, OSError) as error:
        view.problem = str(error)
        return view
    values, finite = sample.values, sample.values.isfinite()
    if not finite.any():
        view.problem = "none of its values is finite" if values.numel() else "it has no elements"
        return view
    view.rows, view.of_tokens = len(values), sample.by_token
    if values.numel() == 1:
        view.value = number(values.item())
        return view
    is_forward = not facts.sees_gradients(capture.hook)
    view.figures += [*of_tokens, _histogram(values[finite], statistics, len(capture))]
    is_drawn = view.heads or (of_tokens and (is_prediction or values[0].numel() == 1))
    if not is_drawn:
        view.figures += _of_rows(sample, capture, "activation" if is_forward else "gradient", facts)
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
    notes = [
        f"mean {statistics.mean:.4g}, std {statistics.std:.4g}, min {number(statistics.low)}, "
        f"max {number(statistics.high)}, {statistics.count:,} values"
    ]
    if statistics.rows < rows:
        notes[0] += f" of {statistics.rows:,} of {counted(rows, 'row')}"
    if statistics.finite < statistics.count:
        notes.append(
            f"{statistics.count - statistics.finite:,} of {statistics.count:,} values are not finite"
        )
    others = array[array != 0]
    zeros = statistics.zeros / max(statistics.finite, 1)
    if zeros >= 0.1 and len(others) and others.min() < others.max():
        notes.append(f"{zeros:.0%} are exactly 0 and not drawn")
        array = others
    start, end = float(array.min()), float(array.max())
    if start == end:
        start, end = start - (abs(start) * 0.5 or 0.5), end + (abs(end) * 0.5 or 0.5)
    counts, edges = np.histogram(array, bins=BINS, range=(start, end))
    return histogram("distribution", counts.tolist(), edges.tolist(), note="; ".join(notes))


def _of_rows(sample: CapturedRows, capture: StoredCapture, kind: str, facts: Facts) -> Iterator[Figure]:
    shape = sample.values.shape[1:]
    match [length for length in shape if length > 1] if not capture.is_by_sample else list(shape):
        case [] | [1]:
            ids, steps = sample.source.sample_ids, sample.source.steps
            of_samples = bool((ids >= 0).all())
            at, order = (ids if of_samples else steps).float().sort(stable=True)
            numbers = sample.values.reshape(-1)[order].tolist()
            series = Series("value", at.tolist(), numbers, dots=of_samples)
            yield lines("value", [series], x="sample" if of_samples else "step", y="value")
        case [_]:
            yield from _vectors(sample, facts)
        case [height, width]:  # such as attention patterns
            tiles = sample.values.reshape(-1, height, width)
            # A matrix that is not square may be a distribution over classes for each token.
            is_pattern = capture.is_by_sample and height == width and is_attention(tiles)
            rows = spread(range(len(tiles)), MOST_MATRICES)
            yield mosaic(
                "attention maps" if is_pattern else "maps",
                tiles[rows].numpy()[None],
                rows=["matrix"],
                columns=", ".join(_names(sample, rows, facts)),
                note=f"each {height} × {width}",
            )
        case [*first, height, width]:
            tiles = sample.values.reshape(-1, math.prod(first), height, width)
            yield _images(sample, tiles, kind if len(shape) == 3 else "", facts)


def _names(sample: CapturedRows, rows: list[int], facts: Facts) -> list[str]:
    """Captions of rows: sample, file and class, or the step; also split and epoch if there are several."""
    source = sample.source
    places = torch.stack([source.sample_ids, source.positions], 1)
    by_epoch = len(places.unique(dim=0)) < len(places) and len(source.epochs.unique()) > 1
    by_split = len(source.split_numbers.unique()) > 1

    def name(row: int) -> str:
        split, number = sample.sample_of(row)
        if number < 0:
            return f"step {source.steps[row]}"
        position = f" at {source.positions[row]}" if source.positions[row] >= 0 else ""
        of_split = f" of {split}" if by_split and split else ""
        epoch = f", epoch {int(source.epochs[row]) + 1}" if by_epoch else ""
        called = facts.called.get((split, number), "")
        return " · ".join(filter(None, [f"sample {number}{position}{of_split}{epoch}", called]))

    return list(map(name, rows))


def _images(sample: CapturedRows, tiles: Tensor, what: str, facts: Facts) -> Figure:
    """A grid of images, a row for each sample; columns are channels, attention heads, or slices if `what` is empty."""
    rows = spread(range(len(tiles)), MOST_IMAGES)
    count = tiles.shape[1]
    title, kind = (f"{what} maps", "channel") if what else ("slices", "slice")
    note = f"each {tiles.shape[2]} × {tiles.shape[3]}"
    if what and is_attention(tiles):
        title, kind, note = "attention maps", "head", f"{note}: a row for each query"
    if count > MOST_CHANNELS:
        note += f"; the first {MOST_CHANNELS:,} of {count:,}"
    columns = f"its one {kind}" if count == 1 else kind if count > MOST_TILES else f"{kind}s 0–{count - 1}"
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


def _vectors(sample: CapturedRows, facts: Facts) -> Iterator[Figure]:
    """The mean of rows that are vectors, as bars or as a line, and some rows as a map."""
    rows = sample.values.flatten(1)
    count, length = rows.shape
    stride = -(-length // MOST_LINES)
    mean, deviation = rows.mean(0), rows.std(0, correction=int(count > 1))
    title, y = (f"mean of {counted(count, 'row')}", "mean") if count > 1 else ("the one row", "value")
    if length <= MOST_BARS:
        note, whiskers = ("whiskers: one standard deviation", deviation.tolist()) if count > 1 else ("", None)
        yield bars(title, mean.tolist(), x="element", y=y, spread=whiskers, note=note)
    else:
        low, high = (edge[::stride].tolist() for edge in (mean - deviation, mean + deviation))
        band = Series("mean", list(range(0, length, stride)), mean[::stride].tolist(), low, high)
        note = "band: one standard deviation" + (f"; every {stride}th element" if stride > 1 else "")
        yield lines(title, [band], x="element", y=y, note=note)
    if count > 1 and length > 1:
        some = spread(range(count), MOST_VECTORS)
        matrix = rows[some][:, ::stride].numpy()
        of_samples = "token" if sample.source.positions[0] >= 0 else "sample"
        kind = of_samples if sample.source.sample_ids[0] >= 0 else "step"
        yield HeatMap(
            "rows",
            matrix,
            rows=_names(sample, some, facts),
            columns=[str(element) for element in range(0, length, stride)],
            x="element",
            note=f"a line for each {kind}",
            valid=np.ones(matrix.shape, dtype=bool),
        ).figure()


def _over_steps(sample: CapturedRows) -> list[Figure]:
    """The distribution over steps, if rows come from several; over the order of recording if steps restart."""
    source, steps = sample.source, sample.source.steps
    pairs = torch.stack([source.split_numbers, source.sample_ids, source.positions], dim=1)
    if (source.sample_ids >= 0).all() and len(pairs.unique(dim=0)) == len(pairs):
        return []  # one row for each sample, or each of its tokens: steps are only batches
    x, clock = "step", steps
    if (steps.diff() < 0).any():
        begins = (steps.diff() != 0) | (source.epochs.diff() != 0)
        x, clock = "in the order of recording", functional.pad(begins.cumsum(0), (1, 0))
    times = clock.unique().tolist()
    if len(times) < 4 or len(sample.values[0].reshape(-1)) < 2:
        return []
    quantiles = list[list[float]]()
    for time in times:
        values = sample.values[clock == time].flatten()
        values = values[values.isfinite()]
        few = values[:: -(-len(values) // 50_000)] if len(values) else torch.full((1,), math.nan)
        quantiles.append(torch.quantile(few, torch.tensor(_QUANTILES)).tolist())
    low, quarter, middle, three, high = (list(column) for column in zip(*quantiles, strict=True))
    xs = [float(time) for time in times]
    series = [Series("5–95 %", xs, middle, low, high), Series("25–75 %", xs, middle, quarter, three)]
    log = spans_magnitudes([*low, *high], 1000)
    return [lines("distribution over steps", series, x=x, y="value", log=log, note="line: the median")]


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
    if len(rows) < _FEWEST_ROWS or rows.dim() < 2 or not rows.numel():
        return []
    kind, by_unit = ("channel", rows.movedim(1, -1)) if rows.dim() == 4 else ("unit", rows)
    by_unit = by_unit.flatten(0, -2)
    looked = f"in the {len(rows)} rows examined"
    low, high = by_unit.amin(0), by_unit.amax(0)
    dead = (low == 0) & (high == 0)
    idle = [("dead", f"exactly 0 {looked}", dead)]
    if module_class in _RANGES:
        least, largest = _RANGES[module_class]
        margin = _NEAR * (largest - (least or 0.0))
        near = by_unit >= largest - margin
        if least is not None:
            near |= by_unit <= least + margin
        meaning = f"within 1 % of a bound of the range in {_OFTEN:.0%} of the values {looked}"
        idle.append(("saturated", meaning, near.float().mean(0) >= _OFTEN))
    idle.append(("constant", f"the same value {looked}", (low == high) & ~dead))
    return [
        {
            "what": what,
            "meaning": meaning,
            "which": mask.nonzero().flatten().tolist(),
            "total": by_unit.shape[1],
            "kind": kind,
        }
        for what, meaning, mask in idle
        if mask.any()
    ]

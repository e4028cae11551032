"""The results of task=effects: the metric as a map over the sites, its estimate, what chance gives, and the samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hookrun.errors import counted, first_lines, shortened
from hookrun.studies.effects.records import (
    CHANCE,
    CIRCUIT,
    CLEAN,
    EXACT,
    GRADIENT,
    OF_SAMPLES,
    PLACEBO,
    PLAIN_OF_SAMPLES,
    REPLACED,
    RESTORED,
    Effects,
    read_effects,
)
from hookrun.studies.kit.drawing import (
    Figure,
    HeatMap,
    RunData,
    Series,
    bars,
    lines,
    module_name,
    number,
)
from hookrun.studies.kit.files import StoreError

ID = "effects"
TITLE = "Effects"
POSITION = 60

MOST_CELLS = 40_000
"""Larger grids are not drawn: effects.csv has them."""
MOST_WITH_LINKS = 4_000
"""Maps of larger grids have no links: each cell would need an element of its own."""
MOST_LINKED = 60
"""How many cells, those that change most, have a list of samples."""
SAMPLES = 6
TOP = 10
Z = 1.96
"""Half the width of a 95% interval, in standard errors."""
_MOST_BARS = 200
_WINDOW = re.compile(r"\.\.\., (\d+:\d+), (\d+:\d+)")


class Map:
    """The cells as rows and columns of a map, in the order of the axes.

    cells: the name of each cell
    links: for each cell the address of its samples, or ""; empty: no links
    """

    def __init__(self, effects: Effects, facts: RunData) -> None:
        labels = {axis: list(_names(axis, values, facts)) for axis, values in effects.axes.items()}
        self.cells = [", ".join(filter(None, names)) for names in product(*labels.values())]
        self.links = list[str]()
        *down, self.across = labels
        self.down = " · ".join(down)
        self.columns = labels.pop(self.across)
        self.rows = [" · ".join(names) for names in product(*labels.values())]
        self.is_line = not down
        if self.is_line:
            self._lay_out_windows()

    def _lay_out_windows(self) -> None:
        """Rows and columns for windows over two dimensions."""
        rows: dict[str, None] = {}
        columns: dict[str, None] = {}
        for label in self.columns:
            match = _WINDOW.fullmatch(label)
            if match is None:
                return
            rows[match[1]] = None
            columns[match[2]] = None
        if len(self.columns) == len(rows) * len(columns):
            self.is_line = False
            self.rows = list(rows)
            self.columns = list(columns)
            self.down = "rows"
            self.across = "columns of the window"

    def draw(self, title: str, values: Tensor, note: str = "", *, are_changes: bool = False) -> Figure:
        """The values of all cells as a map, or of one axis as bars.

        are_changes: they have a sign, and 0 has the colour in the middle
        """
        if self.is_line and len(self.columns) <= _MOST_BARS:
            numbers = values.double().flatten().tolist()
            return bars(title, numbers, x=self.across, y=title, names=self.columns, note=note)
        wide = len(self.columns)
        x = f"across: {self.across}"
        if self.down:
            x += f"; down: {self.down}"
        return HeatMap(
            title,
            values.double().reshape(-1, wide).clip(-1e30, 1e30).float().numpy(),
            rows=self.rows,
            columns=self.columns,
            x=x,
            note=note,
            numbers=wide <= 12 and len(self.rows) <= 24,
            centre=0.0 if are_changes else None,
            links=[self.links[at : at + wide] for at in range(0, len(self.links), wide)],
            written=_signed if are_changes else number,
        ).figure()


def _names(axis: str, labels: Sequence[Any], facts: RunData) -> Iterator[str]:
    """The labels of an axis as texts; positions with the tokens of the first sample."""
    tokens = list[str]()
    if axis == "tokens" and facts.sequences:
        tokens = next(iter(facts.sequences.values())).names
    for label in labels:
        if isinstance(label, int) and -len(tokens) <= label < len(tokens):
            yield f"{label} {tokens[label]}"
        else:
            yield shortened(module_name(str(label)) if axis == "module" else str(label), 40)


def build(facts: RunData) -> dict[str, Any] | None:
    """The maps, the comparison with the estimate and with chance, the top cells, and the samples of the top cells."""
    try:
        effects = read_effects(facts.path)
    except StoreError as error:
        return {"figures": [], "notes": [f"the effects can't be read: {error}"], "faults": []}
    if effects is None:
        return None
    size = math.prod(len(labels) for labels in effects.axes.values())
    faults = first_lines(effects.faults)
    if not 0 < size <= MOST_CELLS:
        note = f"the grid has {size:,} cells, and is not drawn: effects.csv has all of them"
        return {"figures": [], "notes": [note], "faults": faults}
    grid = Map(effects, facts)
    ranked = effects.ranked()
    linked = set(ranked[:MOST_LINKED]) if OF_SAMPLES in effects else set[int]()
    if size <= MOST_WITH_LINKS:
        grid.links = [""] * size
        for at in linked:
            grid.links[at] = f"#cell-{at}"
    metric = shortened(effects.about.get("metric", "metric"))
    return {
        "metric": metric,
        "hook": shortened(effects.about.get("hook", "")),
        "unedited": number(effects.unedited),
        "clean": number(float(effects[CLEAN])) if CLEAN in effects else "",
        "is_estimate": EXACT not in effects,
        "largest": _largest(effects, grid),
        "figures": list(_figures(effects, grid, metric)),
        "top": _top(effects, grid, ranked[:TOP], linked),
        "faults": faults,
        "cells": [_samples(effects, facts, grid, at) for at in sorted(linked)],
        "notes": [],
    }


def _largest(effects: Effects, grid: Map) -> str:
    """``largest −0.31 at layer3, tied with 2 others``."""
    largest = effects.largest()
    if largest is None:
        return "none of them is finite"
    if not largest.change:
        return "no site changes it"
    return f"largest {_signed(largest.change)} at {grid.cells[largest.place]}{largest.tied}"


def _figures(effects: Effects, grid: Map, metric: str) -> Iterator[Figure]:
    """What the hook changes of the metric, and what else is known of each cell."""
    title = f"change of {metric}"
    note = f"0: as without the hook, where it is {number(effects.unedited)}; above 0: the hook raises it"
    if EXACT in effects:
        yield grid.draw(title, effects.changes(EXACT), note, are_changes=True)
    if RESTORED in effects:
        meaning = "0: as without the hook, 1: as in the run to compare with"
        yield grid.draw("restored", effects[RESTORED], meaning)
    if GRADIENT in effects:
        estimate = effects.changes(GRADIENT)
        if EXACT in effects:
            note += _agreement(effects[EXACT], effects[GRADIENT])
        yield grid.draw(f"{title}, estimated from the gradient", estimate, note, are_changes=True)
    if CIRCUIT in effects:
        yield _circuit(effects, grid)
    if OF_SAMPLES in effects and len(effects.samples) > 1:
        values = effects[OF_SAMPLES].double()
        spread = (values - values.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
        yield grid.draw(f"{metric}: standard deviation over the samples", spread)
    if PLACEBO in effects and EXACT in effects:
        placebo = effects.changes(PLACEBO).flatten(1)
        yield _placebo(effects.changes(EXACT).flatten(), placebo, grid, title)


def _agreement(exact: Tensor, estimate: Tensor) -> str:
    pairs = torch.stack([exact.double().flatten(), estimate.double().flatten()])
    pairs = pairs[:, pairs.isfinite().all(0)]
    if pairs.shape[1] < 2:
        return ""
    correlation = float(torch.corrcoef(pairs)[0, 1])
    return "" if math.isnan(correlation) else f"; correlation with the exact values: {correlation:.3f}"


def _placebo(exact: Tensor, placebo: Tensor, grid: Map, title: str) -> Figure:
    """The cells in order of their change, and the range of the placebos [n, cells] of each."""
    order = exact.nan_to_num(-math.inf).argsort(descending=True, stable=True)
    order = order[exact[order].isfinite()]
    places = [float(place) for place in range(len(order))]
    chance = _band("placebo", places, placebo[:, order])
    cells = Series("exact", places, exact[order].tolist(), dots=True)
    return lines(
        f"{title} and what chance gives",
        [cells, chance],
        x="cells in order",
        y=title,
        labels=[grid.cells[at] for at in order.tolist()],
        note="band: from the smallest to the largest value with another sample's values",
    )


def _band(name: str, x: Sequence[float], values: Tensor) -> Series:
    """The mean of values [n, x], in a band from the smallest to the largest."""
    return Series(name, x, values.mean(0).tolist(), values.amin(0).tolist(), values.amax(0).tolist())


def _circuit(effects: Effects, grid: Map) -> Figure:
    """The faithfulness of circuits by size, and the range of that of random sets."""
    order = torch.tensor(effects.sizes).argsort(stable=True)
    sizes = torch.tensor(effects.sizes)[order].tolist()
    curves = [Series("strongest cells", sizes, effects[CIRCUIT][order].tolist())]
    note = f"1: as without the hook; 0: as with all cells replaced, where it is {number(float(effects[REPLACED]))}"
    if CHANCE in effects:
        chance = effects[CHANCE][:, order]
        curves.append(_band("random sets", sizes, chance))
        note += f"; band: from the smallest to the largest value of {counted(len(chance), 'random set')}"
    first = effects.by_strength()[: min(max(effects.sizes), TOP)]
    kept = "; ".join(grid.cells[at] for at in first)
    figure = lines("faithfulness of circuits", curves, x="cells kept", y="faithfulness", note=note)
    return replace(figure, facts=(f"the strongest first: {kept}",))


def _top(effects: Effects, grid: Map, ranked: Sequence[int], linked: set[int]) -> dict[str, Any]:
    """A table of the cells that change the metric most."""
    columns: dict[str, list[str]] = {}
    if OF_SAMPLES in effects:
        columns["change"] = [_interval(_changes(effects, at)) for at in ranked]
    elif EXACT in effects:
        columns["change"] = list(map(_signed, effects.changes(EXACT).flatten()[ranked].tolist()))
    if GRADIENT in effects:
        columns["estimated change"] = list(map(_signed, effects.changes(GRADIENT).flatten()[ranked].tolist()))
    if PLACEBO in effects:
        of_cells = effects.changes(PLACEBO).flatten(1)[:, ranked]
        means = of_cells.mean(0).tolist()
        deviations = of_cells.std(0, correction=0).tolist()
        pairs = zip(means, deviations, strict=True)
        columns["placebo"] = [f"{_signed(mean)} ± {number(deviation)}" for mean, deviation in pairs]
    if RESTORED in effects:
        columns["restored"] = list(map(number, effects[RESTORED].flatten()[ranked].tolist()))
    if EXACT in effects:
        columns["with the hook"] = list(map(number, effects[EXACT].flatten()[ranked].tolist()))
    rows: list[tuple[str, str, list[str]]] = []
    for row, at in enumerate(ranked):
        link = f"#cell-{at}" if at in linked else ""
        rows.append((grid.cells[at], link, [column[row] for column in columns.values()]))
    return {"heads": list(columns), "rows": rows, "has_intervals": OF_SAMPLES in effects}


def _interval(changes: Tensor) -> str:
    """The mean and half the width of its 95% interval."""
    finite = changes[changes.isfinite()]
    error = math.nan
    if len(finite) > 1:
        error = float(finite.std()) / math.sqrt(len(finite))
    return f"{_signed(float(finite.mean()))} ± {number(Z * error)}"


def _signed(value: float) -> str:
    """A difference: ``+0.31``, ``−0.31``, ``0``, ``NaN``."""
    if value < 0:
        return f"−{number(-value)}"
    return f"+{number(value)}" if value > 0 else number(value)


def _values(effects: Effects, at: int) -> Tensor:
    """[samples]: the metric in one cell."""
    return effects[OF_SAMPLES].flatten(0, -2)[at].double()


def _changes(effects: Effects, at: int) -> Tensor:
    """[samples]: what the hook changes of the metric in one cell."""
    return _values(effects, at) - effects[PLAIN_OF_SAMPLES]


def _samples(effects: Effects, facts: RunData, grid: Map, at: int) -> dict[str, Any]:
    """The samples that one cell changes most."""
    rows: list[dict[str, Any]] = []
    values = _values(effects, at)
    changes = _changes(effects, at)
    by_change = changes.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)
    for place in by_change[:SAMPLES].tolist():
        sample = effects.samples[place]
        key = (effects.about.get("split", "val"), sample)
        text = facts.called.get(key, "")
        if key in facts.sequences:
            text = shortened(" ".join(facts.sequences[key].names), 160)
        row = {
            "sample": sample,
            "text": text,
            "picture": facts.pictures.get(key, ""),
            "before": number(float(effects[PLAIN_OF_SAMPLES][place])),
            "after": number(float(values[place])),
            "change": _signed(float(changes[place])),
        }
        rows.append(row)
    return {"id": f"cell-{at}", "name": grid.cells[at], "rows": rows}

"""The results of task=effects: the metric as a map over the sites, its estimate, what chance gives, and the samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hookrun.errors import HookrunError, first_lines, shortened
from hookrun.studies.effects.records import (
    CLEAN,
    EXACT,
    GRADIENT,
    OF_SAMPLES,
    PLACEBO,
    PLAIN,
    PLAIN_OF_SAMPLES,
    RESTORED,
    Effects,
    read_effects,
)
from hookrun.studies.kit.drawing import Facts, Figure, HeatMap, Series, bars, lines, module_name, number

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


class Grid:
    """The cells as rows and columns of a map, in the order of the axes.

    cells: the name of each cell
    links: for each cell the address of its samples, or ""; empty: no links
    """

    def __init__(self, effects: Effects, facts: Facts) -> None:
        labels = {name: list(_named(name, of_axis, facts)) for name, of_axis in effects.axes.items()}
        self.cells = [", ".join(filter(None, names)) for names in product(*labels.values())]
        self.links = list[str]()
        *front, last = labels.values()
        *down, self.across = labels
        self.rows, self.columns = [" · ".join(names) for names in product(*front)], last
        self.down = " · ".join(down)
        windows = [match.groups() for label in last if (match := _WINDOW.fullmatch(label))]
        high, wide = ({each[dim]: None for each in windows} for dim in (0, 1))
        self.is_line = not front and not 0 < len(last) == len(windows) == len(high) * len(wide)
        if not front and not self.is_line:  # windows over two dimensions
            self.rows, self.columns = list(high), list(wide)
            self.across, self.down = "columns of the window", "rows"

    def draw(self, title: str, values: Tensor, note: str = "", centre: float | None = None) -> Figure:
        """The values of all cells as a map, whose colours are centred on `centre`; of one axis, as bars with a line."""
        if self.is_line and len(self.columns) <= _MOST_BARS:
            numbers = values.double().flatten().tolist()
            mark = math.nan if centre is None else centre
            return bars(title, numbers, x=self.across, y=title, names=self.columns, note=note, mark=mark)
        wide = len(self.columns)
        return HeatMap(
            title,
            values.double().reshape(-1, wide).clip(-1e30, 1e30).float().numpy(),
            rows=self.rows,
            columns=self.columns,
            x=f"across: {self.across}" + (f"; down: {self.down}" if self.down else ""),
            note=note,
            numbers=wide <= 12 and len(self.rows) <= 24,
            centre=centre,
            links=[self.links[at : at + wide] for at in range(0, len(self.links), wide)],
        ).figure()


def build(facts: Facts) -> dict[str, Any] | None:
    """The maps, the comparison with the estimate and with chance, the top cells, and the samples of the top cells."""
    try:
        effects = read_effects(facts.path)
    except HookrunError as error:
        return {"figures": [], "notes": [f"the effects can't be read: {error}"], "faults": []}
    if effects is None:
        return None
    size = math.prod(len(labels) for labels in effects.axes.values())
    faults = first_lines(effects.faults)
    if not 0 < size <= MOST_CELLS:
        note = f"the grid has {size:,} cells, and is not drawn: effects.csv has all of them"
        return {"figures": [], "notes": [note], "faults": faults}
    grid = Grid(effects, facts)
    change = (effects.main.double().flatten() - effects[PLAIN]).abs()
    known = change.isfinite().nonzero().flatten()
    ranked = known[change[known].argsort(descending=True, stable=True)].tolist()
    linked = set(ranked[:MOST_LINKED]) if OF_SAMPLES in effects else set[int]()
    if size <= MOST_WITH_LINKS:
        grid.links = [f"#cell-{at}" if at in linked else "" for at in range(size)]
    said = f"without the hook {number(float(effects[PLAIN]))}"
    if CLEAN in effects:
        said += f", in the run to compare with {number(float(effects[CLEAN]))}"
    metric = shortened(effects.about.get("metric", "metric"))
    return {
        "metric": metric,
        "hook": shortened(effects.about.get("hook", "")),
        "said": said,
        "figures": list(_figures(effects, grid, metric, said)),
        "top": _top(effects, grid, ranked[:TOP], linked),
        "faults": faults,
        "cells": [_samples(effects, facts, grid, at) for at in sorted(linked)],
        "notes": [],
    }


def _named(axis: str, labels: Sequence[Any], facts: Facts) -> Iterator[str]:
    """The labels of an axis as texts; positions with the tokens of the first sample."""
    sequence = next(iter(facts.sequences.values()), None) if axis == "tokens" else None
    tokens = [] if sequence is None else sequence.names
    for label in labels:
        there = isinstance(label, int) and -len(tokens) <= label < len(tokens)
        name = module_name(str(label)) if axis == "module" else str(label)
        yield f"{label} {tokens[label]}" if there else shortened(name, 40)


def _figures(effects: Effects, grid: Grid, metric: str, said: str) -> Iterator[Figure]:
    plain = float(effects[PLAIN])
    if EXACT in effects:
        yield grid.draw(metric, effects[EXACT], said, plain)
    if RESTORED in effects:
        yield grid.draw(
            "restored", effects[RESTORED], "0: as without the hook, 1: as in the run to compare with"
        )
    if GRADIENT in effects:
        yield grid.draw(
            f"{metric}, estimated from the gradient",
            effects[GRADIENT],
            _agreement(effects[EXACT], effects[GRADIENT]) if EXACT in effects else said,
            plain,
        )
    if OF_SAMPLES in effects and len(effects.samples) > 1:
        values = effects[OF_SAMPLES].double()
        spread = (values - values.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
        yield grid.draw(f"{metric}: standard deviation over the samples", spread)
    if PLACEBO in effects and EXACT in effects:
        yield _placebo(effects[EXACT].flatten(), effects[PLACEBO].flatten(1), grid, metric)


def _agreement(exact: Tensor, estimate: Tensor) -> str:
    pairs = torch.stack([exact.double().flatten(), estimate.double().flatten()])
    pairs = pairs[:, pairs.isfinite().all(0)]
    correlation = float(torch.corrcoef(pairs)[0, 1]) if pairs.shape[1] > 1 else math.nan
    return "" if math.isnan(correlation) else f"correlation with the exact values: {correlation:.3f}"


def _placebo(exact: Tensor, placebo: Tensor, grid: Grid, metric: str) -> Figure:
    """The cells in order of their value, and the range of the placebos [n, cells] of each."""
    order = exact.nan_to_num(-math.inf).argsort(descending=True, stable=True)
    order = order[exact[order].isfinite()]
    xs, of_cells = list(map(float, range(len(order)))), placebo[:, order]
    low, high = of_cells.amin(0).tolist(), of_cells.amax(0).tolist()
    chance = Series("placebo", xs, of_cells.mean(0).tolist(), low, high)
    cells = Series("exact", xs, exact[order].tolist(), dots=True)
    return lines(
        f"{metric} and what chance gives",
        [cells, chance],
        x="cells in order",
        y=metric,
        labels=[grid.cells[at] for at in order.tolist()],
        note="band: from the smallest to the largest value with another sample's values",
    )


def _top(effects: Effects, grid: Grid, ranked: Sequence[int], linked: set[int]) -> dict[str, Any]:
    """The cells that change most, each with an interval of the mean change over the samples."""
    columns = {
        name: [number(float(effects[name].flatten()[at])) for at in ranked]
        for name in (EXACT, GRADIENT, RESTORED)
        if name in effects
    }
    if OF_SAMPLES in effects:
        columns["change"] = [_interval(_of_cell(effects, at)[1]) for at in ranked]
    if PLACEBO in effects:
        of_cells = effects[PLACEBO].flatten(1).T[ranked]
        ends = zip(of_cells.mean(1).tolist(), of_cells.std(1, correction=0).tolist(), strict=True)
        columns["placebo"] = [f"{number(mean)} ± {number(deviation)}" for mean, deviation in ends]
    return {
        "heads": list(columns),
        "rows": [
            (grid.cells[at], f"#cell-{at}" if at in linked else "", texts)
            for at, *texts in zip(ranked, *columns.values(), strict=True)
        ],
    }


def _interval(changes: Tensor) -> str:
    """The mean and half the width of its 95% interval."""
    finite = changes[changes.isfinite()]
    error = float(finite.std()) / math.sqrt(len(finite)) if len(finite) > 1 else math.nan
    return f"{number(float(finite.mean()))} ± {number(Z * error)}"


def _of_cell(effects: Effects, at: int) -> tuple[Tensor, Tensor]:
    """[samples]: the metric in one cell, and what the hook changes of it."""
    values = effects[OF_SAMPLES].flatten(0, -2)[at].double()
    return values, values - effects[PLAIN_OF_SAMPLES]


def _samples(effects: Effects, facts: Facts, grid: Grid, at: int) -> dict[str, Any]:
    """The samples that one cell changes most."""
    rows = list[dict[str, Any]]()
    values, changes = _of_cell(effects, at)
    for place in changes.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)[:SAMPLES].tolist():
        key = effects.about.get("split", "val"), effects.samples[place]
        sequence = facts.sequences.get(key)
        text = facts.called.get(key, "") if sequence is None else shortened(" ".join(sequence.names), 160)
        rows.append(
            {
                "sample": effects.samples[place],
                "text": text,
                "picture": facts.pictures.get(key, ""),
                "before": number(float(effects[PLAIN_OF_SAMPLES][place])),
                "after": number(float(values[place])),
            }
        )
    return {"id": f"cell-{at}", "name": grid.cells[at], "rows": rows}

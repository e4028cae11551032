"""The results of task=effects: the metric as a map over the sites, its estimate, what chance gives, and the samples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookrun.errors import HookrunError, shortened
from hookrun.report.draw.charts import Figure, Series, bars, lines
from hookrun.report.draw.pictures import Array, heat
from hookrun.report.draw.text import module_name, number
from hookrun.report.facts import Facts
from hookrun.store.effects import (
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


class Grid:
    """A grid of cells as rows and columns of a map.

    order: [rows, columns] the number of the cell at each place of the map, in the order of the axes
    """

    def __init__(self, effects: Effects, facts: Facts) -> None:
        labels = {name: _named(name, of_axis, effects, facts) for name, of_axis in effects.axes.items()}
        self.cells = [", ".join(filter(None, names)) for names in product(*labels.values())]
        *front, last = labels.values()
        self.rows, self.columns = [" · ".join(names) for names in product(*front)], last
        self.across = list(labels)[-1]
        self.down = " · ".join(list(labels)[:-1])
        self.order: NDArray[np.intp] = np.arange(len(self.cells)).reshape(len(self.rows), len(last))
        if len(labels) == 1 and (windows := _windows(last)) is not None:
            self.rows, self.columns, self.order = windows
            self.across, self.down = "columns of the window", "rows"
        elif not front:
            self.rows = [""]

    @property
    def is_line(self) -> bool:
        """Whether the grid has one axis."""
        return self.rows == [""]

    def draw(
        self, title: str, values: Array, links: Sequence[str], note: str = "", centre: float | None = None
    ) -> Figure:
        """The values of all cells as a map, whose colours are centred on `centre`; of one axis, as bars."""
        flat = np.asarray(values, dtype=np.float64).reshape(-1)
        if self.is_line and len(flat) <= 200:
            return bars(title, flat.tolist(), x=self.across, y=title, names=self.columns, note=note)
        few = len(self.columns) <= 12 and len(self.rows) <= 24
        return heat(
            title,
            flat[self.order].clip(-1e30, 1e30).astype(np.float32),
            rows=self.rows,
            columns=self.columns,
            x=f"across: {self.across}" + (f"; down: {self.down}" if self.down else ""),
            note=note,
            numbers=few,
            centre=centre,
            links=[[links[at] for at in row] for row in self.order.tolist()] if links else (),
        )


def build(facts: Facts) -> dict[str, Any] | None:
    """The maps, the comparison with the estimate and with chance, the top cells, and the samples of the top cells."""
    try:
        effects = read_effects(facts.path)
    except HookrunError as error:
        return {"figures": [], "notes": [f"the effects can't be read: {error}"]}
    if effects is None:
        return None
    metric = shortened(effects.about.get("metric", "metric"))
    size = math.prod(len(labels) for labels in effects.axes.values())
    if not 0 < size <= MOST_CELLS:
        note = f"the grid has {size:,} cells, and is not drawn: effects.csv has all of them"
        return {"figures": [], "notes": [note]}
    grid, plain = Grid(effects, facts), float(effects[PLAIN])
    main = (effects[EXACT] if EXACT in effects else effects[GRADIENT]).double().numpy().reshape(-1)
    change = np.abs(main - plain)
    ranked = [
        int(at)
        for at in np.argsort(-np.nan_to_num(change, nan=-1.0), kind="stable")
        if np.isfinite(change[at])
    ]
    linked = set(ranked[:MOST_LINKED]) if OF_SAMPLES in effects else set[int]()
    links = [f"#cell-{at}" if at in linked else "" for at in range(size if size <= MOST_WITH_LINKS else 0)]
    said = f"without the hook {number(plain)}"
    if CLEAN in effects:
        said += f", in the run to compare with {number(float(effects[CLEAN]))}"
    return {
        "metric": metric,
        "hook": shortened(effects.about.get("hook", "")),
        "said": said,
        "figures": _figures(effects, grid, metric, links, said),
        "top": _top(effects, grid, ranked[:TOP], linked),
        "cells": [_samples(effects, facts, grid, at) for at in sorted(linked)],
        "notes": [],
    }


def _named(axis: str, labels: Sequence[Any], effects: Effects, facts: Facts) -> list[str]:
    """The labels of an axis as texts; positions with the tokens of the first sample."""
    if axis == "module":
        return [shortened(module_name(str(label)), 40) for label in labels]
    if axis != "tokens":
        return [shortened(str(label), 40) for label in labels]
    sequence = next(iter(facts.sequences.values()), None)
    tokens = [] if sequence is None else sequence.names

    def named(label: Any) -> str:
        there = isinstance(label, int) and -len(tokens) <= label < len(tokens)
        return f"{label} {tokens[label]}" if there else shortened(str(label), 40)

    return [named(label) for label in labels]


_WINDOW = re.compile(r"\.\.\., (\d+:\d+), (\d+:\d+)")


def _windows(labels: Sequence[str]) -> tuple[list[str], list[str], NDArray[np.intp]] | None:
    """Rows, columns and cells of a grid of windows over two dimensions; None for other labels."""
    found = [_WINDOW.fullmatch(label) for label in labels]
    pairs = [(match[1], match[2]) for match in found if match is not None]
    rows, columns = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True)) if pairs else ([], [])
    if len(pairs) != len(labels) or len(rows) * len(columns) != len(labels):
        return None
    return rows, columns, np.arange(len(labels)).reshape(len(rows), len(columns))


def _figures(effects: Effects, grid: Grid, metric: str, links: list[str], said: str) -> list[Figure]:
    figures, plain = list[Figure](), float(effects[PLAIN])
    exact = effects[EXACT].double().numpy() if EXACT in effects else None
    if exact is not None:
        figures.append(grid.draw(metric, exact, links, said, plain))
    if RESTORED in effects:
        note = "0: as without the hook, 1: as in the run to compare with"
        figures.append(grid.draw("restored", effects[RESTORED].double().numpy(), links, note))
    if GRADIENT in effects:
        estimate = effects[GRADIENT].double().numpy()
        note = said if exact is None else _agreement(exact, estimate)
        figures.append(grid.draw(f"{metric}, estimated from the gradient", estimate, links, note, plain))
    if OF_SAMPLES in effects and len(effects.samples) > 1:
        values = effects[OF_SAMPLES].double()
        spread = (values - values.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
        title = f"{metric}: standard deviation over the samples"
        figures.append(grid.draw(title, spread.numpy(), links))
    if PLACEBO in effects and exact is not None:
        figures.append(_placebo(exact.reshape(-1), effects[PLACEBO].double().numpy(), grid, metric))
    return figures


def _agreement(exact: Array, estimate: Array) -> str:
    x, y = exact.reshape(-1), estimate.reshape(-1)
    both = np.isfinite(x) & np.isfinite(y)
    if both.sum() < 2 or not x[both].std() or not y[both].std():
        return ""
    return f"correlation with the exact values: {np.corrcoef(x[both], y[both])[0, 1]:.3f}"


def _placebo(exact: Array, placebo: Array, grid: Grid, metric: str) -> Figure:
    """The cells in order of their value, and the range of the placebos of each."""
    flat = placebo.reshape(len(placebo), -1)
    order = [int(at) for at in np.argsort(-exact) if math.isfinite(exact[at])]
    xs = list(map(float, range(len(order))))
    low, high = flat.min(0)[order].tolist(), flat.max(0)[order].tolist()
    chance = Series("placebo", xs, flat.mean(0)[order].tolist(), low, high)
    cells = Series("exact", xs, exact[order].tolist(), dots=True)
    return lines(
        f"{metric} and what chance gives",
        [cells, chance],
        x="cells in order",
        y=metric,
        labels=[grid.cells[at] for at in order],
        note="band: from the smallest to the largest value with another sample's values",
    )


def _top(effects: Effects, grid: Grid, ranked: Sequence[int], linked: set[int]) -> dict[str, Any]:
    """The cells that change most, each with an interval of the mean change over the samples."""
    columns = {name: effects[name].reshape(-1) for name in (EXACT, GRADIENT, RESTORED) if name in effects}
    rows = list[tuple[str, str, list[str]]]()
    for at in ranked:
        texts = [number(float(column[at])) for column in columns.values()]
        if OF_SAMPLES in effects:
            texts.append(_interval(_changes(effects, at)))
        if PLACEBO in effects:
            placebo = effects[PLACEBO].flatten(1)[:, at]
            texts.append(f"{number(float(placebo.mean()))} ± {number(float(placebo.std(correction=0)))}")
        rows.append((grid.cells[at], f"#cell-{at}" if at in linked else "", texts))
    further = {"change": OF_SAMPLES in effects, "placebo": PLACEBO in effects}
    return {"heads": [*columns, *(name for name, is_there in further.items() if is_there)], "rows": rows}


def _interval(changes: Array) -> str:
    """The mean and half the width of its 95% interval."""
    finite = changes[np.isfinite(changes)]
    if not len(finite):
        return number(None)
    error = float(finite.std(ddof=1)) / math.sqrt(len(finite)) if len(finite) > 1 else math.nan
    return f"{number(float(finite.mean()))} ± {number(Z * error)}"


def _changes(effects: Effects, at: int) -> Array:
    """[samples]: what the hook changes in one cell."""
    of_samples = effects[OF_SAMPLES].flatten(0, -2)[at] if effects.axes else effects[OF_SAMPLES]
    return (of_samples - effects[PLAIN_OF_SAMPLES]).double().numpy()


def _samples(effects: Effects, facts: Facts, grid: Grid, at: int) -> dict[str, Any]:
    """The samples that one cell changes most."""
    split, changes = effects.about.get("split", "val"), _changes(effects, at)
    values = effects[OF_SAMPLES].flatten(0, -2)[at]
    rows = list[dict[str, Any]]()
    for place in np.argsort(-np.nan_to_num(np.abs(changes), nan=-1.0), kind="stable")[:SAMPLES].tolist():
        key = split, effects.samples[place]
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

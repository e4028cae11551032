"""The samples that excite each unit most: pictures with the place marked, or texts with the token marked."""

from __future__ import annotations

from typing import Any

from hookrun.engine.values.folded import MOST_SHOWN, TOP, Folded, largest_units, split_name
from hookrun.errors import HookrunError
from hookrun.report.draw.text import module_name
from hookrun.report.facts import MOST_ROWS, RunData
from hookrun.store.folds import read_folds

MOST_MODULES = 24
MOST_SAMPLES = 9
_AROUND = 8
"""Tokens shown before and after the marked one."""


def build(facts: RunData) -> dict[str, Any] | None:
    """The units of each fold with a top, those with the largest values first; None if there are no folds.

    modules: for each module its units, with the cells of their samples
    more:    how many modules are not shown
    note:    why the file cannot be read
    """
    try:
        folds = read_folds(facts.path, {})
    except HookrunError as error:
        return {"modules": [], "more": 0, "note": str(error)}
    places = [(hook, module, fold) for hook, modules in folds.items() for module, fold in modules.items()]
    if not places:
        return None
    shown = [_module(facts, *place) for place in places[:MOST_MODULES]]
    return {"modules": shown, "more": len(places) - len(shown), "note": ""}


def _module(facts: RunData, hook: str, module: str, fold: Folded) -> dict[str, Any]:
    """The title of a fold, its units with their cells, and the names of the other units in their order."""
    sizes = list(fold.mean.shape if fold.labels is None else fold.mean.shape[1:])
    about = {
        "title": f"{hook} at {module_name(module)}",
        "says": f"{', '.join(fold.tensors)} of units {sizes}",
    }
    listed = largest_units(fold, MOST_SHOWN + MOST_ROWS)
    units = [{"name": _name(fold, unit), "cells": _cells(facts, fold, unit)} for unit in listed[:MOST_SHOWN]]
    rest = [_name(fold, unit) for unit in listed[MOST_SHOWN:]]
    more = fold.mean.numel() - len(listed) if listed else 0
    return {**about, "units": units, "rest": rest, "more": more}


def _name(fold: Folded, unit: tuple[int, ...]) -> str:
    """``unit 3``, ``label 7, unit 3``"""
    if fold.labels is None:
        return f"unit {', '.join(map(str, unit))}"
    return f"label {fold.labels[unit[0]]}, unit {', '.join(map(str, unit[1:]))}"


def _cells(facts: RunData, fold: Folded, unit: tuple[int, ...]) -> list[dict[str, Any]]:
    """A cell for each of the unit's samples: its value, its picture and the mark in it, or its tokens."""
    cells: list[dict[str, Any]] = []
    columns = [fold.tensors[name][unit][:MOST_SAMPLES].tolist() for name in TOP]
    for value, sample, position, split in zip(*columns, strict=True):
        if sample < 0:
            continue
        key = (split_name(split), sample)
        sequence = facts.sequences.get(key)
        tokens = list[tuple[str, bool]]()
        if sequence is not None:
            start = max(position - _AROUND, 0)
            names = sequence.names[start : position + _AROUND + 1]
            tokens = [(text, start + at == position) for at, text in enumerate(names)]
        cells.append(
            {
                "value": value,
                "sample": " ".join(map(str, key)).strip(),
                "called": facts.called.get(key, ""),
                "tokens": tokens,
                "picture": facts.pictures.get(key),
                "mark": _mark(fold, position),
                "at": position,
            }
        )
    return cells


def _mark(fold: Folded, position: int) -> tuple[float, ...] | None:
    """Left, top, width and height of a place of a map, in hundredths of the picture; None: it has no place there."""
    if fold.places is None or len(fold.places) != 2 or not 0 <= position < fold.places[0] * fold.places[1]:
        return None
    height, width = fold.places
    row, column = divmod(position, width)
    return 100 * column / width, 100 * row / height, 100 / width, 100 / height

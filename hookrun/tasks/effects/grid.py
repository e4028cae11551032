"""The grid of a hook that is moved: its axes with their labels, and a cell for each site that exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from hookrun.errors import Problem
from hookrun.plan.model_tree import ModelNames
from hookrun.plan.plan import PlannedHook
from hookrun.plan.resolve import resolve
from hookrun.run_values import RunReferences
from hookrun.runtime.part import HeadsPart
from hookrun.spec import Spec
from hookrun.tasks.effects.over import (
    AT,
    EACH,
    HEADS,
    INDEX,
    MODULE,
    TOKENS,
    WHERE,
    Over,
    Window,
    index_of,
    varied,
)

MOST_CELLS = 1_000_000


@dataclass(frozen=True, eq=False)
class Axis:
    """One key of `over`.

    labels: what each value is called
    values: as the hook takes them; of `module` the paths of the modules that are hooked together
    ends:   how many heads or channels a module must have for each value
    counts: path of a module -> how many it has; the others have as many as needed
    """

    key: str
    labels: tuple[Any, ...]
    values: tuple[Any, ...]
    ends: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def has(self, number: int, paths: Sequence[str]) -> bool:
        """Whether the modules have the value with this number."""
        return all(self.ends[number] <= self.counts[path] for path in paths if path in self.counts)


@dataclass(frozen=True)
class Cell:
    """One site of the hook.

    place: its number on each axis
    paths: the modules that are hooked
    hook:  the hook there
    """

    place: tuple[int, ...]
    paths: tuple[str, ...]
    hook: PlannedHook


class Grid:
    """The axes and cells of a hook over a model.

    hook:   the hook with the first value of each axis, on all modules
    shapes: path of a module -> the shape of the value that the hook sees there; empty: not known
    tokens: returns how many tokens the longest sample has
    """

    def __init__(
        self,
        over: Over,
        hook: PlannedHook,
        model: nn.Module,
        shapes: Mapping[str, Sequence[int]],
        tokens: Callable[[], int],
        runs: RunReferences,
        seed: int,
    ) -> None:
        self.problems = list[Problem]()
        self._hook, self._model, self._runs, self._seed = hook, model, runs, seed
        self._shapes, self._tokens = shapes, tokens
        self._paths = tuple(match.path for match in hook.matches)
        self.axes = [self._axis(key, values) for key, values in over.items()]
        self.sizes = tuple(len(axis.labels) for axis in self.axes)
        self.cells = self._cells()

    @property
    def labels(self) -> dict[str, list[Any]]:
        """Name of an axis -> the labels along it."""
        return {axis.key: list(axis.labels) for axis in self.axes}

    def planned(self, values: Mapping[str, Any], base: PlannedHook | None = None) -> PlannedHook | None:
        """A hook, by default the whole grid's, with other values of its keys; mistakes are added to the problems."""
        base = base or self._hook
        spec, wrong = varied(base.spec, values)
        self.problems += wrong
        if wrong:
            return None
        filters = () if spec.keys.tokens is None else spec.keys.tokens.filters
        names_texts = any(True for each in filters for _ in each.texts)
        if not names_texts and spec.action.outside_values() == base.spec.action.outside_values():
            return replace(base, spec=spec)
        plan, wrong = resolve(Spec((spec,), self._seed), self._model, self._runs)
        self.problems += wrong
        return plan.hooks[0] if plan.hooks else None

    # ---- axes ------------------------------------------------------------------------------------------------------

    def _axis(self, key: str, values: Any) -> Axis:
        if isinstance(values, tuple):
            return Axis(key, tuple(map(_label, values)), self._modules(values) if key == MODULE else values)
        if key == MODULE:
            groups = tuple(self._paths[start:end] for start, end in _runs(values, len(self._paths)))
            return Axis(key, tuple(":".join(dict.fromkeys((each[0], each[-1]))) for each in groups), groups)
        if key == INDEX and values != EACH:
            return self._windows(values)
        counts = (
            {"": self._tokens()} if key == TOKENS else self._heads() if key == HEADS else self._channels()
        )
        runs = _runs(values, max(counts.values(), default=0))
        if not runs:
            text = "there is nothing to count: the model, or its data, does not show how many there are"
            self.problems.append(Problem(f"{WHERE}.{key}", text, "list the values: [0, 1, 2]"))
        labels = (start if values == EACH else f"{start}:{end}" for start, end in runs)
        ends = tuple(end for _, end in runs)
        return Axis(
            key,
            tuple(labels),
            tuple(AT[key](start, end - start) for start, end in runs),
            ends,
            {} if key == TOKENS else counts,
        )

    def _modules(self, values: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
        """The modules of each member of the list: a path, or a selector of several that are hooked together."""
        names, groups = ModelNames(self._model), list[tuple[str, ...]]()
        for number, selector in enumerate(values):
            spec, wrong = varied(self._hook.spec, {MODULE: selector}, f".{number}")
            self.problems += wrong
            groups.append(() if wrong else tuple(names.select(spec)))
        return tuple(groups)

    def _channels(self) -> dict[str, int]:
        return {path: shape[1] if len(shape) > 1 else 0 for path, shape in self._shapes.items()}

    def _heads(self) -> dict[str, int]:
        """Path -> how many heads its value has."""
        keys, counts = self._hook.spec.keys, dict[str, int]()
        assert keys.heads is not None  # the hook has the first value of each axis
        if not self._shapes:
            return {path: known.counts[0] for path, known in self._hook.heads.items()}
        for path, shape in self._shapes.items():
            part = HeadsPart(keys.heads, self._hook.heads[path], 1)
            try:
                counts[path] = part.place(torch.empty(*shape, device="meta"))[1]
            except ValueError as error:
                self.problems.append(Problem(f"{WHERE}.{HEADS}", f"on {path or '(root)'}: {error}"))
        return counts

    def _windows(self, values: Window) -> Axis:
        """Windows over the last dimensions of the value."""
        dims = len(values.window)
        sizes = {tuple(shape[-dims:]) for shape in self._shapes.values() if len(shape) >= dims}
        if len(sizes) != 1:
            text = f"the values have the shapes {[list(shape) for shape in self._shapes.values()]}"
            hint = f"windows need the same last {dims} dimensions everywhere: list the values"
            self.problems.append(Problem(f"{WHERE}.{INDEX}", text, hint))
            return Axis(INDEX, (), ())
        runs = [_runs(values, size, dim) for dim, size in enumerate(sizes.pop())]
        texts = tuple(map(index_of, product(*runs)))
        return Axis(INDEX, texts, texts)

    # ---- cells -----------------------------------------------------------------------------------------------------

    def _cells(self) -> list[Cell]:
        """A cell for each place that its modules have."""
        if (count := math.prod(self.sizes)) > MOST_CELLS:
            text = f"spans {count:,} cells, at most {MOST_CELLS:,} are possible"
            self.problems.append(Problem(WHERE, text))
        if self.problems:
            return []
        hooks, cells = dict[tuple[Any, ...], PlannedHook | None](), list[Cell]()
        for place in product(*map(range, self.sizes)):
            at = dict(zip(self.axes, place, strict=True))
            paths = next((axis.values[n] for axis, n in at.items() if axis.key == MODULE), self._paths)
            if not all(axis.has(n, paths) for axis, n in at.items()):
                continue
            others = {axis.key: n for axis, n in at.items() if axis.key != MODULE}
            key = tuple(others.values())
            if key not in hooks:
                hooks[key] = self.planned(
                    {axis.key: axis.values[n] for axis, n in at.items() if axis.key in others}
                )
            if (hook := hooks[key]) is not None:
                cells.append(Cell(place, paths, hook))
        return cells


def _runs(values: Any, count: int, dim: int = 0) -> list[tuple[int, int]]:
    """(start, end) of each value: one after the other, or windows of which the last may be cut off."""
    if values == EACH:
        return [(start, start + 1) for start in range(count)]
    size, stride = values.window[dim], values.stride[dim % len(values.stride)]
    starts = range(0, max(count - size, 0) + stride, stride) if count > size else range(min(count, 1))
    return [(start, min(start + size, count)) for start in starts]


def _label(value: Any) -> Any:
    """A value as a label: numbers and texts as they are, others as YAML writes them on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_label(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_label(each)) for each in value)}]"
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else str(value)

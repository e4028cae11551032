"""The grid of a hook that is moved: its axes with their labels, and a cell for each site that exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    EACH,
    HEADS,
    INDEX,
    MODULE,
    TOKENS,
    WHERE,
    Over,
    Window,
    channel_of,
    heads_of,
    index_of,
    tokens_of,
    varied,
)

MOST_CELLS = 1_000_000


@dataclass(frozen=True)
class Axis:
    """One key of `over`.

    labels: what each value is called
    values: as the hook takes them; of `module` the paths of the modules that are hooked together
    reach:  path of a module -> how many of the values it has; a path that is not named has all of them
    """

    key: str
    labels: tuple[Any, ...]
    values: tuple[Any, ...]
    reach: Mapping[str, int]


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
        self.axes = [axis for key, values in over.items() if (axis := self._axis(key, values)) is not None]
        self.sizes = tuple(len(axis.labels) for axis in self.axes)
        self.cells = [] if self.problems or self._is_large() else self._cells()

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
        named = [each for clause in filter(None, [spec.keys.tokens]) for each in clause.filters]
        reads = any(True for each in named for _ in each.texts)
        if not reads and spec.action.outside_values() == base.spec.action.outside_values():
            return replace(base, spec=spec)
        plan, wrong = resolve(Spec((spec,), self._seed), self._model, self._runs)
        self.problems += wrong
        return plan.hooks[0] if plan.hooks else None

    # ---- axes ------------------------------------------------------------------------------------------------------

    def _axis(self, key: str, values: Any) -> Axis | None:
        if isinstance(values, tuple):
            return (
                self._modules(values) if key == MODULE else Axis(key, tuple(map(_label, values)), values, {})
            )
        if key == MODULE:
            return self._neighbours(values)
        if key == TOKENS:
            return self._counted(key, values, self._tokens(), tokens_of)
        if not self._shapes:
            text = "the model cannot be run beforehand, so what there is cannot be counted"
            self.problems.append(Problem(f"{WHERE}.{key}", text, "list the values: [0, 1, 2]"))
            return None
        if key == HEADS:
            return self._with_reach(key, values, self._heads(), heads_of)
        if values == EACH:
            channels = {path: shape[1] if len(shape) > 1 else 0 for path, shape in self._shapes.items()}
            return self._with_reach(key, values, channels, lambda start, _: channel_of(start))
        return self._windows(values)

    def _modules(self, values: Sequence[Any]) -> Axis:
        """A label for each member of the list: a module, or a selector of several that are hooked together."""
        names, groups = ModelNames(self._model), list[tuple[str, ...]]()
        for number, selector in enumerate(values):
            spec, wrong = varied(self._hook.spec, {MODULE: selector}, f".{number}")
            self.problems += wrong
            groups.append(() if wrong else tuple(names.select(spec)))
        return Axis(MODULE, tuple(map(_label, values)), tuple(groups), {})

    def _neighbours(self, values: Any) -> Axis:
        if values == EACH:
            return Axis(MODULE, self._paths, tuple((path,) for path in self._paths), {})
        (size,), starts = values.window, values.starts(0, len(self._paths))
        groups = tuple(self._paths[start : start + size] for start in starts)
        return Axis(MODULE, tuple(map(_run_of, groups)), groups, {})

    def _counted(self, key: str, values: Any, count: int, at: Callable[[int, int], Any]) -> Axis:
        if values == EACH:
            return Axis(key, tuple(range(count)), tuple(at(start, 1) for start in range(count)), {})
        (size,), starts = values.window, values.starts(0, count)
        ends = [min(start + size, count) for start in starts]
        runs = list(zip(starts, ends, strict=True))
        return Axis(
            key,
            tuple(f"{start}:{end}" for start, end in runs),
            tuple(at(start, end - start) for start, end in runs),
            {},
        )

    def _with_reach(
        self, key: str, values: Any, counts: Mapping[str, int], at: Callable[[int, int], Any]
    ) -> Axis:
        """An axis as long as the module with the most needs; other modules have a part of it."""
        axis = self._counted(key, values, max(counts.values(), default=0), at)
        if values == EACH or len(set(counts.values())) < 2:
            return replace(axis, reach=counts if values == EACH else {})
        text = f"the modules have different numbers of {key}: {sorted(set(counts.values()))}"
        self.problems.append(Problem(f"{WHERE}.{key}", text, "use each, or a list"))
        return axis

    def _heads(self) -> dict[str, int]:
        """Path -> how many heads its value has."""
        keys, counts = self._hook.spec.keys, dict[str, int]()
        assert keys.heads is not None  # the hook has the first value of each axis
        for path, shape in self._shapes.items():
            part = HeadsPart(keys.heads, self._hook.heads[path], 1)
            try:
                counts[path] = part.place(torch.empty(*shape, device="meta"))[1]
            except ValueError as error:
                self.problems.append(Problem(f"{WHERE}.{HEADS}", f"on {path or '(root)'}: {error}"))
        return counts

    def _windows(self, values: Window) -> Axis:
        """Windows over the last dimensions of the value."""
        dims, where = len(values.window), f"{WHERE}.{INDEX}"
        ends = {tuple(shape[-dims:]) for shape in self._shapes.values()}
        if len(ends) > 1 or len(next(iter(ends))) < dims:
            text = f"the values have the shapes {[list(shape) for shape in self._shapes.values()]}"
            self.problems.append(
                Problem(where, text, f"windows need the same last {dims} dimensions: list them")
            )
            return Axis(INDEX, (), (), {})
        sizes = next(iter(ends))
        places = product(*(values.starts(dim, size) for dim, size in enumerate(sizes)))
        texts = tuple(
            index_of(start, [min(w, end - s) for w, s, end in zip(values.window, start, sizes, strict=True)])
            for start in places
        )
        return Axis(INDEX, texts, texts, {})

    # ---- cells -----------------------------------------------------------------------------------------------------

    def _is_large(self) -> bool:
        count = math.prod(self.sizes)
        if count > MOST_CELLS:
            self.problems.append(
                Problem(WHERE, f"spans {count:,} cells, at most {MOST_CELLS:,} are possible")
            )
        return count > MOST_CELLS

    def _cells(self) -> list[Cell]:
        """A cell for each place, but for places beyond the reach of one of its modules."""
        hooks, cells = dict[tuple[int, ...], PlannedHook | None](), list[Cell]()
        others = [number for number, axis in enumerate(self.axes) if axis.key != MODULE]
        for place in product(*map(range, self.sizes)):
            paths = self._paths
            for axis, number in zip(self.axes, place, strict=True):
                paths = axis.values[number] if axis.key == MODULE else paths
            at = tuple(place[number] for number in others)
            reached = (
                place[number] < self.axes[number].reach.get(path, math.inf)
                for number in others
                for path in paths
            )
            if not all(reached):
                continue
            if at not in hooks:
                values = {self.axes[n].key: self.axes[n].values[place[n]] for n in others}
                hooks[at] = self.planned(values)
            if (hook := hooks[at]) is not None:
                cells.append(Cell(place, paths, hook))
        return cells


def _label(value: Any) -> Any:
    """A value as a label: numbers and texts as they are, others as text."""
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else str(value)


def _run_of(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]}:{paths[-1]}"

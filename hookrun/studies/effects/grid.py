"""The grid of a hook that is moved: its axes with their labels, a cell for each site that exists, and its trials."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from hookrun.engine.actions import values as action_values
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.plan.resolve import resolve
from hookrun.engine.plan.texts import unknown_spans
from hookrun.engine.prove.trial import on_a_copy
from hookrun.engine.runtime.apply_action import Op, SiteRunner
from hookrun.engine.runtime.part import HeadsPart
from hookrun.engine.runtime.tokens.calls import IDS, MASK
from hookrun.engine.spec import Spec
from hookrun.engine.spec.hook import HookKeys
from hookrun.engine.spec.tokens import Tokens
from hookrun.errors import CompileError, Problem, counted, listed, refuse
from hookrun.studies.effects.circuit import KeptCells
from hookrun.studies.effects.over import (
    CALL,
    EACH,
    EXPERTS,
    HEADS,
    INDEX,
    MODULE,
    TOKENS,
    WHERE,
    Over,
    Window,
    index_of,
    neighbours,
    varied,
)
from hookrun.studies.effects.records import PLACEBO
from hookrun.studies.effects.replay import Scouted, scout
from hookrun.studies.effects.rest import Rest
from hookrun.studies.kit.passes import (
    EXAMPLE_BATCH,
    Prepared,
    RunValues,
    Split,
    as_call,
    data,
    missing_spans,
    structure,
)
from hookrun.studies.kit.tasks import samples_of_a_pass

MOST_CELLS = 1_000_000


@dataclass(frozen=True)
class Cell:
    """One site of the hook.

    number: its place in the order of the axes, in which sites that do not exist count too
    place:  its number on each axis
    paths:  the modules that are hooked
    hook:   the hook there
    """

    number: int
    place: tuple[int, ...]
    paths: tuple[str, ...]
    hook: PlannedHook


@dataclass(frozen=True)
class Trial:
    """One value of a cell for each sample.

    kind:   exact, gradient (an estimate, without a pass of its own) or placebo
    number: of the seed, or of the placebo
    hook:   the hook at the cell: its own, or a placebo
    seed:   what the random numbers of the hook are derived from, unless it has a seed of its own
    """

    kind: str
    number: int
    cell: Cell
    hook: PlannedHook
    seed: int


@dataclass(frozen=True, eq=False)
class GridAxis:
    """One key of `over`.

    labels: what each value is called
    values: as the hook takes them; of `module` the paths of the modules that are hooked together
    lacks:  for each value the modules that have fewer heads or channels; empty: all modules have all values
    """

    key: str
    labels: Sequence[Any]
    values: Sequence[Any]
    lacks: Sequence[Set[str]] = ()


class SiteGrid:
    """The axes and cells of a hook over a model.

    prepared: the experiment whose hook `name` has the first value of each axis, on all modules
    split:    of the samples
    hook:     that hook
    scouted:  what a run of a copy of the model with the example showed
    rest:     what replaces the cells outside a circuit; None: there is no circuit

    Raises CompileError with all mistakes found.
    """

    def __init__(self, prepared: Prepared, name: str, over: Over, split: Split) -> None:
        self._problems = list[Problem]()
        self.prepared = prepared
        self._split = split
        self.rest: Rest | None = None
        self.hook = next(hook for hook in prepared.plan.hooks if hook.spec.name == name)
        self.runs = RunValues.of(prepared.experiment, split, prepared.data)
        self.example = as_call(prepared.data.example(EXAMPLE_BATCH), prepared.model)
        seen = on_a_copy(prepared.model, self.example, partial(scout, self.hook), training=False)
        self.scouted = Scouted() if isinstance(seen, str) else seen
        self._paths = tuple(match.path for match in self.hook.matches)
        self.axes = [self._axis(key, values) for key, values in over.items()]
        self.sizes = tuple(len(axis.labels) for axis in self.axes)
        self.cells = list(self._cells())
        refuse(self._problems, CompileError)

    def _planned(self, values: Mapping[str, Any], base: PlannedHook | None = None) -> PlannedHook | None:
        """A hook, by default the whole grid's, with other values of its keys; mistakes are added to the problems."""
        base = base or self.hook
        spec, wrong = varied(base.spec, values)
        self._problems += wrong
        if wrong:
            return None
        tokens = spec.keys.tokens
        names_texts = tokens is not None and any(list(each.texts) for each in tokens.filters)
        if not names_texts and spec.action.outside_values() == base.spec.action.outside_values():
            return replace(base, spec=spec)
        one = Spec((spec,), self.prepared.plan.seed)
        plan, wrong = resolve(one, self.prepared.model, self.runs, self.names())
        self._problems += wrong
        return plan.hooks[0] if plan.hooks else None

    def lines(self) -> Iterator[str]:
        """How many cells there are, and what `index: each` counts, for the plan."""
        sizes = " × ".join(f"{axis.key} {len(axis.labels)}" for axis in self.axes)
        yield f"{counted(len(self.cells), 'cell')}: {sizes}; the plan shows the first value of each"
        if any(axis.key == INDEX and axis.lacks for axis in self.axes):
            shapes = dict.fromkeys(map(str, map(list, self._shapes.values())))
            yield (
                f"index: each counts dimension 1 of values of shape {listed(list(shapes), 4)}; for another dimension, "
                "list its numbers: ['..., 0', '..., 1']"
            )

    def names(self) -> ModelNames:
        """The names of the model, with what hooks add."""
        names = ModelNames(self.prepared.model)
        for hook in self.prepared.plan.hooks:
            names.add_points(hook)
        return names

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The modules of all cells."""
        return tuple(dict.fromkeys(path for cell in self.cells for path in cell.paths))

    def name_of(self, trial: Trial | KeptCells) -> str:
        """``module=relu1, heads=0``, ``4 cells kept``."""
        if isinstance(trial, KeptCells):
            return f"{counted(len(trial.cells), 'cell')} kept"
        pairs = zip(self.axes, trial.cell.place, strict=True)
        return ", ".join(f"{axis.key}={axis.labels[at]}" for axis, at in pairs)

    def try_every_cell(self, hook_of: Callable[[Cell], PlannedHook], runner: SiteRunner) -> Op:
        """What runs in place of the hook in a trial: every cell of this module, each on the value without the hook."""
        site = runner.site
        if site.hook_name != self.hook.spec.name:
            return runner.op()
        forms: dict[str, PlannedHook] = {}
        for cell in self.cells:
            if site.path in cell.paths:
                hook = hook_of(cell)
                forms[json.dumps(structure(Spec((hook.spec,))), default=str)] = hook

        def try_all(value: Any) -> Any:
            for hook in forms.values():
                runner.variant(hook, 0)(value)
            return value

        return try_all

    # ---- axes ------------------------------------------------------------------------------------------------------

    def _axis(self, key: str, values: Any) -> GridAxis:
        if isinstance(values, tuple):
            labels = [_label(value) for value in values]
            if key == MODULE:
                return GridAxis(key, labels, list(self._modules(values)))
            self._require(key, values)
            return GridAxis(key, labels, values)
        if key == MODULE:
            return self._axis_of_modules(values)
        if key == INDEX and values != EACH:
            windows = self._windows(values)
            return GridAxis(key, windows, windows)
        return self._counted_axis(key, values)

    def _axis_of_modules(self, values: Any) -> GridAxis:
        """Each module, or windows of neighbouring ones."""
        groups = [self._paths[start:end] for start, end in _runs(values, len(self._paths))]
        labels: list[str] = []
        for paths in groups:
            labels.append(paths[0] if len(paths) == 1 else f"{paths[0]}:{paths[-1]}")
        return GridAxis(MODULE, labels, groups)

    def _counted_axis(self, key: str, values: Any) -> GridAxis:
        """Each head, token, channel, call or expert, or windows of neighbouring ones."""
        counts = {"": max(self._lengths, default=0)} if key == TOKENS else self._counts(key)
        labels: list[Any] = []
        numbers: list[Any] = []
        lacks: list[Set[str]] = []
        for start, end in _runs(values, max(counts.values(), default=0)):
            labels.append(start if values == EACH else f"{start}:{end}")
            numbers.append(neighbours(key, start, end - start))
            lacks.append({path for path, count in counts.items() if count < end})
        if not numbers:
            self._problems.append(
                Problem(
                    f"{WHERE}.{key}",
                    "there is nothing to count: the model, or its data, does not show how many there are",
                    "list the values: [0, 1, 2]",
                )
            )
        return GridAxis(key, labels, numbers, lacks)

    def _modules(self, values: Sequence[Any]) -> Iterator[tuple[str, ...]]:
        """The modules of each member of the list: a path, or a selector of several that are hooked together."""
        names = self.names()
        for number, selector in enumerate(values):
            spec, wrong = varied(self.hook.spec, {MODULE: selector}, f".{number}")
            self._problems += wrong
            matches = () if wrong else names.matches(spec)
            yield tuple(match.path for match in matches)

    def _require(self, key: str, values: Sequence[Any]) -> None:
        """Note the listed values that the key cannot have, and those that a module or a sample does not have."""
        where = f"{WHERE}.{key}"
        for value in values:
            spec, wrong = varied(self.hook.spec, {key: value})
            if wrong:
                self._problems += wrong
            elif key in (HEADS, CALL):
                self._problems += [Problem(where, why) for why in self._lacking(key, spec.keys)]
            elif key == EXPERTS:
                _, wrong = resolve(Spec((spec,)), self.prepared.model, self.runs, self.names())
                self._problems += [problem.moved(where) for problem in wrong]
            elif key == TOKENS and spec.keys.tokens is not None:
                for problem in self._misses(spec.keys.tokens):
                    self._problems.append(problem.moved(where))

    def _lacking(self, key: str, keys: HookKeys) -> Iterator[str]:
        """Which modules do not have these heads or calls."""
        for path, count in self._counts(key).items():
            name = path or "(root)"
            if key == HEADS and keys.heads:
                why = keys.heads.misfit(count)
            else:
                why = keys.when.beyond(count)
                name += f" called {counted(count, 'time')} in a forward"
            if why is not None:
                yield f"on {name}: {why}"

    def _misses(self, tokens: Tokens) -> Iterator[Problem]:
        """Which of the tokens a sample does not have."""
        yield from unknown_spans(tokens, WHERE, self.prepared.data)
        settings = self.prepared.settings
        yield from missing_spans([(tokens, WHERE)], settings, self._split, len(self._lengths))
        is_strict = tokens.missing == "error" and tokens.phase != "generation" and not tokens.padding
        if tokens.position is None or not self._lengths or not is_strict:
            return
        shortest = min(self._lengths)
        for number in tokens.position.numbers:
            # the end of a range is excluded
            most = shortest - 1 if number in tokens.position.places else shortest
            if not -shortest <= number <= most:
                yield Problem(
                    WHERE,
                    f"the shortest sample has {counted(shortest, 'token')} and no position {number}",
                    f"{{position: {tokens.position}, missing: skip}} leaves samples without it as they are",
                )

    @cached_property
    def _lengths(self) -> list[int]:
        """How many tokens each sample of the pass has, without padding; empty if samples are not of tokens."""
        if self.prepared.data.tokenizer is None:
            return []
        settings = self.prepared.settings
        samples: Any = data.load(settings.data, self._split, seed=settings.seed)
        lengths: list[int] = []
        for number in range(samples_of_a_pass(settings, len(samples)) or 0):
            inputs, *_ = samples[number]
            mask = inputs.get(MASK)
            lengths.append(inputs[IDS].numel() if mask is None else int(mask.count_nonzero()))
        return lengths

    def _counts(self, key: str) -> dict[str, int]:
        """Path -> how many heads its value has, how many channels, how many experts, or how often it is called."""
        counts: dict[str, int] = {}
        if key == EXPERTS:
            for path in self._paths:
                module = self.prepared.model.get_submodule(path)
                counts[path] = self.hook.spec.action.count_of(key, module) or 0
            return counts
        if key == CALL:
            for path in self._paths:
                if path in self.scouted.calls:
                    counts[path] = self.scouted.calls[path]
            return counts
        if key == INDEX:
            for path, shape in self._shapes.items():
                counts[path] = shape[1] if len(shape) > 1 else 0
            return counts
        for path, of_path in self.hook.heads.items():
            counts[path] = of_path.counts[0]
        heads = self.hook.spec.keys.heads
        assert heads is not None  # the hook has the first value of each axis
        for path, shape in self._shapes.items():
            try:
                part = HeadsPart(heads, self.hook.heads[path], 1)
                counts[path] = part.place(torch.empty(*shape, device="meta"))[1]
            except ValueError as error:
                self._problems.append(Problem(f"{WHERE}.{HEADS}", f"on {path or '(root)'}: {error}"))
        return counts

    @cached_property
    def _shapes(self) -> dict[str, Sequence[int]]:
        """Path of a hooked module -> the shape of what the hook sees there first, as a run of the model has shown."""
        shapes = dict(self.scouted.shapes)
        points = self.names().tree.points
        for match in self.hook.matches:
            if (
                match.path in points and match.shape is not None
            ):  # not in the model alone: the trial run has seen it
                shapes[match.path] = json.loads(match.shape)
        return shapes

    def _windows(self, values: Window) -> list[str]:
        """Windows over the last dimensions of the value."""
        dims = len(values.window)
        shapes = [list(shape) for shape in self._shapes.values()]
        sizes = {tuple(shape[-dims:]) for shape in shapes if len(shape) >= dims}
        if len(sizes) != 1:
            self._problems.append(
                Problem(
                    f"{WHERE}.{INDEX}",
                    f"the values have the shapes {shapes}",
                    f"windows need the same last {dims} dimensions everywhere: list the values",
                )
            )
            return []
        runs = [_runs(values, size, dim) for dim, size in enumerate(sizes.pop())]
        return list(map(index_of, product(*runs)))

    # ---- cells -----------------------------------------------------------------------------------------------------

    def _cells(self) -> Iterator[Cell]:
        """A cell for each place that its modules have."""
        if (count := math.prod(self.sizes)) > MOST_CELLS:
            self._problems.append(
                Problem(WHERE, f"spans {count:,} cells, at most {MOST_CELLS:,} are possible")
            )
        if self._problems:
            return
        hooks: dict[tuple[int, ...], PlannedHook | None] = {}
        for at, place in enumerate(product(*map(range, self.sizes))):
            paths = self._paths
            values: dict[str, Any] = {}
            numbers: list[int] = []  # the place without that of the module
            lacking = set[str]()
            for axis, number in zip(self.axes, place, strict=True):
                if axis.lacks:
                    lacking |= axis.lacks[number]
                if axis.key == MODULE:
                    paths = axis.values[number]
                else:
                    values[axis.key] = axis.values[number]
                    numbers.append(number)
            if not lacking.isdisjoint(paths):
                continue
            key = tuple(numbers)
            if key not in hooks:
                hooks[key] = self._planned(values)
            hook = hooks[key]
            if hook is not None:
                yield Cell(at, place, paths, hook)

    # ---- trials ------------------------------------------------------------------------------------------------------

    def trials(self, counts: Mapping[str, int], placebos: int) -> list[Trial]:
        """The trials of each cell: so many of each method, and the placebos. Raises CompileError for these.

        Jobs with another number draw other random numbers.
        """
        trials: list[Trial] = []
        placebo_of: dict[int, PlannedHook | None] = {}  # by the id of a cell's hook
        for cell in self.cells:
            for kind, count in counts.items():
                trials += self._repeated(kind, count, cell, cell.hook)
            if not placebos:
                continue
            if id(cell.hook) not in placebo_of:
                values = cell.hook.spec.action.outside_values()
                drawn = {field: _resampled(value) for field, value in values.items()}
                placebo_of[id(cell.hook)] = self._planned(drawn, cell.hook)
            placebo = placebo_of[id(cell.hook)]
            if placebo is not None:
                trials += self._repeated(PLACEBO, placebos, cell, placebo)
        refuse(self._problems, CompileError)
        return trials

    def _repeated(self, kind: str, count: int, cell: Cell, hook: PlannedHook) -> Iterator[Trial]:
        """So many trials of a cell, each with other random numbers."""
        seeds = hook.spec.action.fields_of(Meaning.SEED)
        given = {name: value for name, value in seeds.items() if value is not None}
        for number in range(count):
            if number and given:
                spec, _ = varied(hook.spec, {name: value + number for name, value in given.items()})
                yield Trial(kind, number, cell, replace(hook, spec=spec), self.prepared.plan.seed + number)
            else:
                yield Trial(kind, number, cell, hook, self.prepared.plan.seed + number)


def _runs(values: Any, count: int, dim: int = 0) -> list[tuple[int, int]]:
    """(start, end) of each value: one after the other, or windows of which the last may be cut off."""
    if values == EACH:
        return [(start, start + 1) for start in range(count)]
    size = values.window[dim]
    stride = values.stride[dim % len(values.stride)]
    starts = range(min(count, 1))
    if count > size:
        starts = range(0, count - size + stride, stride)
    return [(start, min(start + size, count)) for start in starts]


def _label(value: Any) -> Any:
    """A value as a label: numbers and texts as they are, others as YAML writes them on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_label(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_label(each)) for each in value)}]"
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else str(value)


def _resampled(value: Any) -> Any:
    """The value, with that of each sample drawn from the other samples."""
    if not isinstance(value, action_values.RunValue):
        return value
    changed: dict[str, Any] = {}
    if value.minus is not None:
        changed["minus"] = _resampled(value.minus)
    if value.sample == "same":
        changed["sample"] = "resample"
    return value.model_copy(update=changed)

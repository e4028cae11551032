"""The grid of a hook that is moved: its axes with their labels, a cell for each site that exists, and its jobs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from hookrun import data
from hookrun.data import Split
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.values import RunValue
from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.plan.resolve import resolve
from hookrun.engine.plan.texts import unknown_spans
from hookrun.engine.prove.trial import on_a_copy
from hookrun.engine.runtime.apply_action import Op
from hookrun.engine.runtime.part import HeadsPart
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.tokens.calls import IDS, MASK
from hookrun.engine.runtime.wiring import Variant
from hookrun.engine.spec import Spec
from hookrun.engine.spec.hook import HookKeys
from hookrun.engine.spec.tokens import Tokens
from hookrun.errors import CompileError, Problem, counted, refuse
from hookrun.run.experiment.model_task import samples_of_a_pass
from hookrun.run.experiment.prepared import EXAMPLE_BATCH, Prepared, as_call
from hookrun.run.experiment.proving import structure
from hookrun.run.experiment.run_values import RunValues
from hookrun.run.experiment.sample_checks import missing_spans
from hookrun.studies.effects.over import (
    CALL,
    EACH,
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

MOST_CELLS = 1_000_000


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


@dataclass(frozen=True)
class Job:
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
class Axis:
    """One key of `over`.

    labels: what each value is called
    values: as the hook takes them; of `module` the paths of the modules that are hooked together
    lacks:  for each value the modules that have fewer heads or channels; empty: all modules have all values
    """

    key: str
    labels: Sequence[Any]
    values: Sequence[Any]
    lacks: Sequence[Set[str]] = ()


class Grid:
    """The axes and cells of a hook over a model.

    prepared: the experiment whose hook `name` has the first value of each axis, on all modules
    split:    of the samples
    hook:     that hook
    scouted:  what a run of a copy of the model with the example showed

    Raises CompileError with all mistakes found.
    """

    def __init__(self, prepared: Prepared, name: str, over: Over, split: Split) -> None:
        self._problems, self.prepared, self._split = list[Problem](), prepared, split
        self.hook = next(hook for hook in prepared.plan.hooks if hook.spec.name == name)
        self._runs = RunValues.of(prepared.experiment, split, prepared.data)
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
        filters = () if spec.keys.tokens is None else spec.keys.tokens.filters
        names_texts = any(True for each in filters for _ in each.texts)
        if not names_texts and spec.action.outside_values() == base.spec.action.outside_values():
            return replace(base, spec=spec)
        plan, wrong = resolve(Spec((spec,), self.prepared.plan.seed), self.prepared.model, self._runs)
        self._problems += wrong
        return plan.hooks[0] if plan.hooks else None

    def tried(self, site: HookSite, op: Op, variant: Variant) -> Op:
        """What runs in place of the hook in a trial: every cell of this module, each on the value without the hook."""
        if site.hook_name != self.hook.spec.name:
            return op
        hooks = (cell.hook for cell in self.cells if site.path in cell.paths)
        forms = {json.dumps(structure(Spec((hook.spec,))), default=str): hook for hook in hooks}

        def try_all(value: Any) -> Any:
            for hook in forms.values():
                variant(hook, 0)(value)
            return value

        return try_all

    # ---- axes ------------------------------------------------------------------------------------------------------

    def _axis(self, key: str, values: Any) -> Axis:
        if isinstance(values, tuple):
            if key == MODULE:
                return Axis(key, list(map(_label, values)), list(self._modules(values)))
            self._require(key, values)
            return Axis(key, list(map(_label, values)), values)
        if key == MODULE:
            groups = [self._paths[start:end] for start, end in _runs(values, len(self._paths))]
            return Axis(key, [":".join(dict.fromkeys((each[0], each[-1]))) for each in groups], groups)
        if key == INDEX and values != EACH:
            windows = self._windows(values)
            return Axis(key, windows, windows)
        counts = {"": max(self._lengths, default=0)} if key == TOKENS else self._counts(key)
        runs = _runs(values, max(counts.values(), default=0))
        if not runs:
            self._problems.append(
                Problem(
                    f"{WHERE}.{key}",
                    "there is nothing to count: the model, or its data, does not show how many there are",
                    "list the values: [0, 1, 2]",
                )
            )
        return Axis(
            key,
            [start if values == EACH else f"{start}:{end}" for start, end in runs],
            [neighbours(key, start, end - start) for start, end in runs],
            [{path for path, count in counts.items() if count < end} for _, end in runs],
        )

    def _modules(self, values: Sequence[Any]) -> Iterator[tuple[str, ...]]:
        """The modules of each member of the list: a path, or a selector of several that are hooked together."""
        names = ModelNames(self.prepared.model)
        for number, selector in enumerate(values):
            spec, wrong = varied(self.hook.spec, {MODULE: selector}, f".{number}")
            self._problems += wrong
            yield () if wrong else tuple(match.path for match in names.matches(spec))

    def _require(self, key: str, values: Sequence[Any]) -> None:
        """Note the listed values that the key cannot have, and those that a module or a sample does not have."""
        where = f"{WHERE}.{key}"
        for value in values:
            spec, wrong = varied(self.hook.spec, {key: value})
            if not wrong and key in (HEADS, CALL):
                wrong = [Problem(where, why) for why in self._lacking(key, spec.keys)]
            if not wrong and key == TOKENS and spec.keys.tokens is not None:
                wrong = [replace(each, where=where) for each in self._misses(spec.keys.tokens)]
            self._problems += wrong

    def _lacking(self, key: str, keys: HookKeys) -> Iterator[str]:
        """Which modules do not have these heads or calls."""
        for path, count in self._counts(key).items():
            why = keys.heads.misfit(count) if key == HEADS and keys.heads else keys.when.beyond(count)
            if why is not None:
                called = f" called {counted(count, 'time')} in a forward" if key == CALL else ""
                yield f"on {path or '(root)'}{called}: {why}"

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
        every = (samples[number][0] for number in range(samples_of_a_pass(settings, len(samples)) or 0))
        masks = (inputs.get(MASK, torch.ones_like(inputs[IDS])) for inputs in every)
        return [int(mask.count_nonzero()) for mask in masks]

    def _counts(self, key: str) -> dict[str, int]:
        """Path -> how many heads its value has, how many channels, or how often it is called."""
        if key == CALL:
            return {path: self.scouted.calls[path] for path in self._paths if path in self.scouted.calls}
        if key == INDEX:
            return {path: shape[1] if len(shape) > 1 else 0 for path, shape in self.scouted.shapes.items()}
        counts = {path: known.counts[0] for path, known in self.hook.heads.items()}
        heads = self.hook.spec.keys.heads
        assert heads is not None  # the hook has the first value of each axis
        for path, shape in self.scouted.shapes.items():
            try:
                part = HeadsPart(heads, self.hook.heads[path], 1)
                counts[path] = part.place(torch.empty(*shape, device="meta"))[1]
            except ValueError as error:
                self._problems.append(Problem(f"{WHERE}.{HEADS}", f"on {path or '(root)'}: {error}"))
        return counts

    def _windows(self, values: Window) -> list[str]:
        """Windows over the last dimensions of the value."""
        dims = len(values.window)
        sizes = {tuple(shape[-dims:]) for shape in self.scouted.shapes.values() if len(shape) >= dims}
        if len(sizes) != 1:
            self._problems.append(
                Problem(
                    f"{WHERE}.{INDEX}",
                    f"the values have the shapes {[list(shape) for shape in self.scouted.shapes.values()]}",
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
        hooks = dict[tuple[int, ...], PlannedHook | None]()
        for place in product(*map(range, self.sizes)):
            at = list(zip(self.axes, place, strict=True))
            paths = next((axis.values[n] for axis, n in at if axis.key == MODULE), self._paths)
            if any(axis.lacks and not axis.lacks[n].isdisjoint(paths) for axis, n in at):
                continue
            others = [(axis, n) for axis, n in at if axis.key != MODULE]
            key = tuple(n for _, n in others)
            if key not in hooks:
                hooks[key] = self._planned({axis.key: axis.values[n] for axis, n in others})
            if (hook := hooks[key]) is not None:
                yield Cell(place, paths, hook)

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def jobs(self, counts: Mapping[str, int], placebos: int) -> list[Job]:
        """The jobs of each cell: so many of each method, and the placebos. Raises CompileError for these.

        Jobs with another number draw other random numbers.
        """
        jobs, of_others = list[Job](), dict[int, PlannedHook | None]()
        for cell in self.cells:
            if placebos and id(cell.hook) not in of_others:
                drawn = {
                    field: _resampled(value)
                    for field, value in cell.hook.spec.action.outside_values().items()
                }
                of_others[id(cell.hook)] = self._planned(drawn, cell.hook)
            kinds = [(kind, count, cell.hook) for kind, count in counts.items()]
            if (other := of_others.get(id(cell.hook))) is not None:
                kinds.append((PLACEBO, placebos, other))
            for kind, count, hook in kinds:
                seeds = hook.spec.action.fields_of(Meaning.SEED)
                for number in range(count):
                    if number and any(value is not None for value in seeds.values()):
                        spec, _ = varied(hook.spec, {name: value + number for name, value in seeds.items()})
                        hook = replace(hook, spec=spec)
                    jobs.append(Job(kind, number, cell, hook, self.prepared.plan.seed + number))
        refuse(self._problems, CompileError)
        return jobs


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


def _resampled(value: Any) -> Any:
    """The value, with that of each sample drawn from the other samples."""
    if not isinstance(value, RunValue):
        return value
    changed = {"minus": None if value.minus is None else _resampled(value.minus)}
    if value.sample == "same":
        changed["sample"] = "resample"
    return value.model_copy(update=changed)

"""What replaces the cells outside a circuit: the hook at each cell, and the value of a site with all cells replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.actions import values as action_values
from hookrun.engine.actions.replace import Replace
from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.plan.resolve import resolve
from hookrun.engine.runtime.apply_action import Op
from hookrun.engine.spec import Spec
from hookrun.engine.values.containers import members, rebuild
from hookrun.errors import CompileError, Problem, counted, listed, refuse
from hookrun.studies.effects.circuit import REST
from hookrun.studies.effects.parts import with_members
from hookrun.studies.kit.passes import Prepared, RunValues, row_problems


class Rest:
    """The hook that replaces a cell, for each hook of the grid.

    value:   what the cells are replaced with
    names:   of the model, with what hooks add
    samples: how many samples the run has; None: not known

    Raises CompileError if there is no such value, or it does not fit.
    """

    def __init__(
        self,
        prepared: Prepared,
        hook: PlannedHook,
        value: Any,
        runs: RunValues,
        names: ModelNames,
        samples: int | None,
    ) -> None:
        self.value = _completed(value, hook, runs)
        self._action = Replace(value=self.value)
        spec = replace(hook.spec, action=self._action)
        plan, problems = resolve(Spec((spec,), prepared.plan.seed), prepared.model, runs, names)
        problems += row_problems(plan, samples, trains=False)
        moved = runs.padded_otherwise(self.value)
        if moved is not None:
            problems.append(Problem(REST, moved, "pad the samples of both runs on the same side"))
        refuse([problem.moved(REST) for problem in problems], CompileError)
        self._values = plan.hooks[0].values
        self._hooks = dict[int, PlannedHook]()  # by the id of a hook of the grid

    def of(self, hook: PlannedHook) -> PlannedHook:
        """What replaces the cells of a hook of the grid."""
        if id(hook) not in self._hooks:
            spec = replace(hook.spec, action=self._action)
            self._hooks[id(hook)] = replace(hook, spec=spec, values=self._values)
        return self._hooks[id(hook)]


def _completed(value: Any, hook: PlannedHook, runs: RunValues) -> Any:
    """The value with what it leaves out: it is taken at the same place, and from the capture of the hook's own value.

    If the hook has no such value it comes from the only capture of the run.
    """
    if not isinstance(value, action_values.OutsideValue):
        return value
    changed: dict[str, Any] = {"minus": _completed(value.minus, hook, runs)}
    if hook.spec.takes_part and "at" not in value.model_fields_set:
        changed["at"] = "same"
    if isinstance(value, action_values.RunValue) and not value.capture:
        changed |= _capture(value.run, hook, runs)
    return value.model_copy(update=changed)


def _capture(name: str, hook: PlannedHook, runs: RunValues) -> dict[str, Any]:
    """The capture to read, and the path in it. Raises CompileError if it is not known which one it is."""
    for value in hook.spec.action.outside_values().values():
        if isinstance(value, action_values.RunValue):
            return {"capture": value.capture, "path": value.path}
    run = runs.open(name)
    if run is None:
        return {}
    captures = list(run.captures)
    if len(captures) != 1:
        what = f"the run {name} has {counted(len(captures), 'capture')}: {listed(captures)}"
        raise CompileError([Problem(f"{REST}.capture", what, "name the one that holds the values")])
    return {"capture": captures[0]}


@dataclass(frozen=True)
class ReplacedValue:
    """The value of a site with all cells replaced, for one copy of the batch.

    leaves: place of a tensor in the value -> the tensor with all cells replaced, and for each of its elements the
            number of the group of cells that it belongs to; of size 1 along a dimension in which these are the same
    groups: the cells of each group; the first one has none
    """

    leaves: Mapping[int, tuple[Tensor, Tensor]]
    groups: Sequence[frozenset[int]]

    def keeping(self, cells: frozenset[int], value: Any) -> Any:
        """The value of a copy of the batch in which all cells but these are replaced."""
        replaced = [not group <= cells for group in self.groups]
        if not any(replaced):
            return value
        leaves = members(value)
        for place, (rest, group_of) in self.leaves.items():
            is_replaced = torch.tensor(replaced, device=group_of.device)[group_of]
            leaves[place] = torch.where(is_replaced, rest, leaves[place])
        return with_members(value, leaves)


def replaced_value(value: Any, ops: Mapping[int, Op]) -> ReplacedValue:
    """Replace all cells in a value.

    ops: number of a cell -> what replaces its elements, with what does not depend on the value
    """
    zeros = rebuild(value, partial(_filled, 0))
    ones = rebuild(value, partial(_filled, 1))
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    groups = [frozenset[int]()]
    for cell, op in ops.items():
        for place, (from_zero, from_one) in enumerate(
            zip(members(op(zeros)), members(op(ones)), strict=True)
        ):
            if not isinstance(from_zero, Tensor):
                continue
            inside = (from_zero != 0) | (from_one != 1)  # what is not replaced has stayed 0 and 1
            rest, group_of = leaves.get(place) or (from_zero, torch.zeros_like(inside, dtype=torch.int64))
            for number in group_of[inside].unique().tolist():
                group_of = group_of.masked_fill(inside & (group_of == number), len(groups))
                groups.append(groups[number] | {cell})
                leaves[place] = torch.where(inside, from_zero, rest), group_of
    narrowed = {place: (rest, _narrowed(group_of)) for place, (rest, group_of) in leaves.items()}
    return ReplacedValue(narrowed, groups)


def _narrowed(numbers: Tensor) -> Tensor:
    """The numbers, once where they are the same along a dimension."""
    for dim in range(numbers.dim()):
        first = numbers[(slice(None),) * dim + (slice(1),)]
        if bool((numbers == first).all()):
            numbers = first
    return numbers


def _filled(number: int, leaf: Any) -> Any:
    return torch.full_like(leaf, number) if isinstance(leaf, Tensor) else leaf

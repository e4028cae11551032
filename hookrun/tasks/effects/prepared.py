"""A prepared experiment whose hook is moved: the grid of its cells, all checked, and the jobs to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hookrun import data
from hookrun.actions.fields import Meaning
from hookrun.actions.values import RunValue
from hookrun.data import DataInfo, Split
from hookrun.data.samples import Samples
from hookrun.errors import CompileError, counted
from hookrun.plan.plan import PlannedHook
from hookrun.prove.trial import prove
from hookrun.run_values import RunReferences
from hookrun.runtime.tokens.calls import IDS, MASK
from hookrun.spec import HookSpec, Settings
from hookrun.tasks.effects.grid import Cell, Grid
from hookrun.tasks.effects.moved import Job, Moved
from hookrun.tasks.effects.over import Over, varied
from hookrun.tasks.effects.scout import Scouted, scouted
from hookrun.tasks.run.prepare import EXAMPLE_BATCH, Prepared, as_call
from hookrun.tasks.under_hooks import samples_of_a_pass

EXACT, PLACEBO = "exact", "placebo"


@dataclass(frozen=True, kw_only=True)
class PreparedEffects(Prepared):
    """An experiment with the grid of its hook.

    jobs:      what is computed, in the order of the cells
    estimated: the jobs whose change is estimated from the gradient
    scouted:   what a run of a copy of the model showed
    moved:     what the hooks do in each pass
    """

    grid: Grid
    jobs: tuple[Job, ...]
    estimated: tuple[Job, ...]
    scouted: Scouted
    moved: Moved


def with_grid(
    prepared: Prepared,
    name: str,
    over: Over,
    split: Split,
    *,
    exact: bool,
    gradient: bool,
    placebos: int,
    seeds: int,
) -> PreparedEffects:
    """The prepared experiment with every cell of its grid, tried in one run of a copy of the model.

    name:            of the hook that is moved
    exact, gradient: how the cells are computed
    placebos, seeds: how many jobs of either kind a cell has

    Raises CompileError with all mistakes found.
    """
    plan, model, info = prepared.plan, prepared.model, prepared.data
    hook = next(each for each in plan.hooks if each.spec.name == name)
    example = as_call(info.example(EXAMPLE_BATCH), model)
    seen = scouted(model, example, hook)
    found = Scouted() if isinstance(seen, str) else seen
    runs = RunReferences.of(prepared.experiment, split, info)
    grid = Grid(
        over,
        hook,
        model,
        found.shapes,
        lambda: _longest(prepared.settings, split, info),
        runs,
        plan.seed,
    )
    if grid.problems:
        raise CompileError(grid.problems)
    trying = Moved(name)
    trying.trial = grid.cells
    prove(plan, model, example, training=False, backward=False, around=trying.around)
    jobs = _jobs(grid, plan.seed, placebos, seeds)
    if grid.problems:
        raise CompileError(grid.problems)
    sizes = " × ".join(f"{axis.key} {len(axis.labels)}" for axis in grid.axes)
    line = f"{counted(len(grid.cells), 'cell')}: {sizes}; the plan shows the first value of each"
    moved = Moved(name)
    given = {name: value for name, value in vars(prepared).items() if name in Prepared.__dataclass_fields__}
    return PreparedEffects(
        **given | {"lines": (*prepared.lines, line), "around": moved.around},
        grid=grid,
        jobs=tuple(jobs) if exact else (),
        estimated=tuple(job for job in jobs if job.kind == EXACT) if gradient else (),
        scouted=found,
        moved=moved,
    )


def _jobs(grid: Grid, seed: int, count: int, seeds: int) -> list[Job]:
    """The jobs of each cell: one for each seed, and the placebos."""
    jobs, placebos = list[Job](), dict[int, PlannedHook | None]()
    for number, cell in enumerate(grid.cells):
        for repeat in range(seeds):
            jobs.append(_job(EXACT, repeat, number, cell, cell.hook, seed))
        if not count:
            continue
        if id(cell.hook) not in placebos:
            placebos[id(cell.hook)] = grid.planned(_of_others(cell.hook.spec), cell.hook)
        if (hook := placebos[id(cell.hook)]) is not None:
            jobs += [_job(PLACEBO, repeat, number, cell, hook, seed) for repeat in range(count)]
    return jobs


def _job(kind: str, number: int, cell_number: int, cell: Cell, hook: PlannedHook, seed: int) -> Job:
    """A job; those with another number draw other random numbers."""
    own = hook.spec.action.fields_of(Meaning.SEED)
    if number and any(value is not None for value in own.values()):
        spec, _ = varied(hook.spec, {name: value + number for name, value in own.items()})
        hook = replace(hook, spec=spec)
    return Job(kind, number, cell_number, cell.paths, hook, seed + number)


def _of_others(spec: HookSpec) -> Mapping[str, Any]:
    """The values of the hook, those of each sample drawn from the other samples."""
    return {field: _resampled(value) for field, value in spec.action.outside_values().items()}


def _resampled(value: Any) -> Any:
    if not isinstance(value, RunValue):
        return value
    changed = {"minus": None if value.minus is None else _resampled(value.minus)}
    if value.sample == "same":
        changed["sample"] = "resample"
    return value.model_copy(update=changed)


def _longest(settings: Settings, split: Split, info: DataInfo) -> int:
    """How many tokens the longest sample of the pass has, without padding; 0 if samples are not of tokens."""
    if info.tokenizer is None:
        return 0
    samples = data.load(settings.data, split, seed=settings.seed)
    count = samples_of_a_pass(settings, len(samples)) or 0
    return max((_length(samples, number) for number in range(count)), default=0)


def _length(samples: Samples, number: int) -> int:
    inputs = samples[number][0]
    assert isinstance(inputs, dict)  # samples of tokens are
    mask = inputs.get(MASK)
    return len(inputs[IDS]) if mask is None else int((mask != 0).sum())

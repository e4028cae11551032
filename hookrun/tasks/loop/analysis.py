"""What an analysis starts from: a run, its captures with one row for each sample, the rows as matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.lookup import Lookup
from hookrun.run_values import FoundRuns, UsedRun, used_run
from hookrun.spec import Experiment
from hookrun.store.captures import StoredCapture
from hookrun.store.reader import Run
from hookrun.store.run_dir import RunDir
from hookrun.tasks.base import Ready
from hookrun.tasks.loop.progress import Screen

WIDEST = 4096
"""Elements of a row; wider ones are projected at random to so many, which keeps their angles and distances."""


@dataclass(frozen=True)
class Analysis(Ready):
    """An analysis whose run was found.

    captures: module -> what was captured there, a row for each sample
    found:    the run, for the record
    """

    run: Run
    captures: Mapping[str, StoredCapture]
    found: UsedRun

    @property
    def runs(self) -> tuple[UsedRun, ...]:
        """The run that is looked at."""
        return (self.found,)


@dataclass(frozen=True)
class Analysing:
    """An analysis under way: what it reads, the run directory of its own, the screen."""

    analysis: Analysis
    run_dir: RunDir
    screen: Screen


def find(experiment: Experiment, path: str | None, hook: str | None) -> Analysis:
    """Open the run and choose its captures.

    hook: the name of the hook that captured them; None: the only one

    Raises SpecError with what is missing.
    """
    if path is None:
        text = f"task={experiment.settings.task.name} reads what another run captured, and none is named"
        raise SpecError([Problem("task.run", text, "name its directory: task.run=outputs/latest")])
    try:
        runs = FoundRuns(experiment.runs)
        run, used = runs.open(path), used_run("task.run", path, runs)
        if run is None or used is None:
            hint = "leave task=plan out, and it is run first"
            raise SpecError([Problem("task.run", f"{path} is still to be run", hint)])
        return Analysis(experiment, run, _captures(run, hook), used)
    except SpecError:
        raise
    except HookrunError as error:
        raise SpecError([Problem("task.run", str(error))]) from error


def _captures(run: Run, name: str | None) -> dict[str, StoredCapture]:
    """Module -> capture, of those that hold one tensor with one row for each sample."""
    there = {hook: run.captures[hook] for hook in run.captures}
    if name is None and len(there) != 1:
        listed = ", ".join(there) or "nothing"
        hint = "name one: task.capture=NAME" if there else "give a run that has a hook with action: capture"
        raise SpecError([Problem("task.capture", f"{run.path} captured {listed}", hint)])
    if name is not None and name not in there:
        raise SpecError([Problem("task.capture", f"found {name!r}", nearest(name, there))])
    modules = there[name] if name is not None else next(iter(there.values()))
    found = dict[str, StoredCapture]()
    for module in modules:
        kept = modules[module]
        inside = (
            {f"{module} {path}": kept[path] for path in kept} if isinstance(kept, Lookup) else {module: kept}
        )
        found |= {label: each for label, each in inside.items() if _is_by_sample(each)}
    if not found:
        text = f"no module of it has one row for each sample in {run.path}"
        raise SpecError([Problem("task.capture", text, "capture with task=predict")])
    return found


def _is_by_sample(capture: StoredCapture) -> bool:
    ids = capture.sample_ids
    return bool((ids >= 0).all()) and len(ids.unique()) == len(ids)


def matrix(capture: StoredCapture, seed: int) -> Tensor:
    """[samples, elements] float32, with at most `WIDEST` elements; `seed` is that of the projection."""
    rows = capture[:].float().reshape(len(capture), -1)
    if rows.shape[1] <= WIDEST:
        return rows
    generator = torch.Generator().manual_seed(seed)
    projected: Tensor = rows @ (torch.randn(rows.shape[1], WIDEST, generator=generator) / WIDEST**0.5)
    return projected


def table(*columns: str) -> Table:
    """An empty table; all its columns but the first are of numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made

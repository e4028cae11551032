"""The input of an analysis: a run and its captures with one row for each sample, or two runs; tables of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hookrun.errors import nearest, printable, refused_at, spec_error
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.run_values import BY_TOKEN, RunReferences, is_by_token
from hookrun.run.experiment.task import Ready
from hookrun.run.tasks.captured.features import Features
from hookrun.store.captures.read import StoredCapture, captured_tensors
from hookrun.store.config.stored import read_yaml
from hookrun.store.format import CAPTURES, INDEX, MULTIRUN, OVERRIDES, STATUS, SWEEP
from hookrun.store.reader import Run, open_run
from hookrun.store.records import UsedRunRecord

_LEAST_NAME = 16
"""The characters of a name that a table keeps on any terminal."""


@dataclass(frozen=True)
class Analysis(Ready):
    """An analysis with the run that it reads.

    captures: module path -> its capture, [samples, ...]
    runs:     how the run was found, for the record
    """

    run: Run
    captures: Mapping[str, StoredCapture]
    runs: tuple[UsedRunRecord, ...] = ()


@dataclass(frozen=True)
class TwoRuns(Ready):
    """Two runs to be compared, or the jobs of two sweeps in pairs.

    jobs:     name of a job -> its run in each sweep; for two runs one pair with the name ``""``
    unpaired: the jobs of one of the sweeps only
    runs:     how the runs were found, for the record
    """

    jobs: Mapping[str, tuple[Run, Run]]
    unpaired: tuple[str, ...] = ()
    runs: tuple[UsedRunRecord, ...] = ()


def find(experiment: Experiment, path: str | None, hook: str | None, *, by_token: bool) -> Analysis:
    """Open the run and choose its captures.

    path:     the directory or name of the run; None is an error
    hook:     the name of the hook that captured; None: the only one of the run
    by_token: a sample may have a row for each of its tokens

    Raises SpecError if there is no run, no such hook, or no capture with one row for each sample.
    """
    run, used = opened(experiment, "task.run", path)
    with refused_at("task.run"):
        return Analysis(experiment, run, _captures(run, hook, by_token), (used,))


def opened(experiment: Experiment, where: str, path: str | None) -> tuple[Run, UsedRunRecord]:
    """The run that the key `where` names by its directory or name, and how it was found.

    Raises SpecError if there is none.
    """
    if path is None:
        raise spec_error(
            where,
            f"task={experiment.settings.task.name} reads the captures of another run, and no run is named",
            f"name its directory: {where}=outputs/latest",
        )
    runs = RunReferences.of(experiment)
    with refused_at(where):
        run, used = runs.open(path), runs.used(where, path)
    if run is None or used is None:
        raise spec_error(where, f"{path} has not been run yet", "leave out task=plan, so that it runs first")
    return run, used


def _captures(run: Run, name: str | None, by_token: bool) -> dict[str, StoredCapture]:
    """Module path -> capture, for the captures that hold one tensor with one row for each sample, or each token."""
    there = run.captures
    if name is None and len(there) != 1:
        listed = ", ".join(there) or "nothing"
        hint = "name one: task.capture=NAME"
        if not there:  # often the newest run: an analysis, or the training before it
            hint = "give a run that has a hook with action: capture"
            others = sorted(
                (file.parent.parent for file in run.path.parent.glob(f"*/{CAPTURES}/{INDEX}")), reverse=True
            )
            newest = next((each for each in others if not each.is_symlink()), None)
            hint += f"; the newest one beside it: task.run={printable(str(newest))}" if newest else ""
        raise spec_error("task.capture", f"{run.path} captured {listed}", hint)
    if name is not None and name not in there:
        raise spec_error("task.capture", f"found {name!r}", nearest(name, there))
    tensors = [each for each in captured_tensors(there) if name in (None, each.hook)]
    found = {
        f"{each.module} {each.path}" if each.path else each.module: each
        for each in tensors
        if _is_by_sample(each, by_token)
    }
    if not found:
        hint = BY_TOKEN if any(map(is_by_token, tensors)) else "capture with task=predict"
        raise spec_error(
            "task.capture", f"in {run.path} no module of this hook has one row for each sample", hint
        )
    return found


def _is_by_sample(capture: StoredCapture, by_token: bool) -> bool:
    ids = capture.sample_ids
    tokens = [capture.positions, capture.keys] if by_token else []
    samples = torch.stack([capture.split_numbers, ids, *tokens], dim=1)
    return bool((ids >= 0).all()) and len(samples.unique(dim=0)) == len(ids)


def projection_entry(features: Features) -> dict[str, Any]:
    """The entry about the projection of a module's features in a line of metrics; empty without a projection."""
    return {} if features.projection is None else {"projection": str(features.projection)}


def show_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows that begin with a name. Names that do not fit lose their left ends; numbers are never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    others = sum(max(map(len, column)) + 3 for column in list(zip(headings, *rows, strict=True))[1:])
    room = max(console.width - others - 2, _LEAST_NAME)
    for name, *texts in rows:
        name = name or "(root)"
        table.add_row(name if len(name) <= room else f"…{name[1 - room :]}", *texts)
    narrow, console.width = console.width, max(console.width, room + others + 2)
    console.print(table)
    console.width = narrow


# ---- two runs ------------------------------------------------------------------------------------------------------


def find_both(experiment: Experiment, path: str | None, other: str | None) -> TwoRuns:
    """Open two runs or two sweeps. Raises SpecError if one does not exist or only one is a sweep."""
    named = {"task.run": path, "task.other": other}
    sweeps = [[] if name is None or name in experiment.runs else _jobs(Path(name)) for name in named.values()]
    if not any(sweeps):
        (run, used), (other_run, other_used) = (opened(experiment, *each) for each in named.items())
        return TwoRuns(experiment, {"": (run, other_run)}, runs=(used, other_used))
    if not all(sweeps):
        sweep, single = (path, other) if sweeps[0] else (other, path)
        raise spec_error(
            "task.other",
            f"{sweep} is a sweep, and {single} is not",
            "name two sweeps, or two runs: a job is a run too",
        )
    here, there = map(_by_overrides, sweeps)
    if not here.keys() & there.keys():
        here, there = ({job.name: job for job in jobs} for jobs in sweeps)
    pairs = {name: (open_run(job), open_run(there[name])) for name, job in here.items() if name in there}
    runs = (UsedRunRecord(where=where, run=str(name), path=str(name)) for where, name in named.items())
    return TwoRuns(experiment, pairs, tuple(here.keys() ^ there.keys()), tuple(runs))


def _jobs(folder: Path) -> list[Path]:
    """The directories of a sweep's jobs, by number; none if the folder is not that of a sweep."""
    folder = folder.expanduser()
    if not any((folder / name).is_file() for name in (MULTIRUN, SWEEP)):
        return []
    return sorted((file.parent for file in folder.rglob(STATUS)), key=lambda job: (len(str(job)), str(job)))


def _by_overrides(jobs: list[Path]) -> dict[str, Path]:
    """Each job by the overrides that not all jobs of the sweep have; by its directory if these are not unique."""
    typed = [[str(text) for text in read_yaml(job / OVERRIDES, job) or ()] for job in jobs]
    names = [
        ", ".join(text for text in texts if not all(text in every for every in typed)) or job.name
        for job, texts in zip(jobs, typed, strict=True)
    ]
    return dict(zip(names if len(set(names)) == len(jobs) else [job.name for job in jobs], jobs, strict=True))

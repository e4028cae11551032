"""The input of an analysis: a run and its captures with one row for each sample, or two runs; tables of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from hookrun.store.config.row_files import RowFiles
from hookrun.store.config.stored import read_yaml
from hookrun.store.format import CAPTURES, INDEX, MULTIRUN, OVERRIDES, STATUS, SWEEP
from hookrun.store.reader import Run, open_run
from hookrun.store.records import UsedRunRecord
from hookrun.store.row_folder import RowFolder, open_folder

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

    jobs:     name of a job -> its run in each sweep; for two runs one pair with the name ``""``; none as long as one of
              them is still to be made, as one of the needs
    unpaired: the jobs of one of the sweeps only
    runs:     how the runs were found, for the record
    """

    jobs: Mapping[str, tuple[Run, Run]]
    unpaired: tuple[str, ...] = ()
    runs: tuple[UsedRunRecord, ...] = ()


def find(
    experiment: Experiment, path: str | None, hook: str | None, rows: RowFiles | None, *, by_token: bool
) -> Analysis | None:
    """Open the run and choose its captures. None: it is one of the needs and is still to be made.

    path:     the directory or name of the run; None is an error
    hook:     the name of the hook that captured; None: the only one of the run
    rows:     the run is a folder of files of another program, and which are read
    by_token: a sample may have a row for each of its tokens

    Raises SpecError if there is no run, no such hook, or no capture with one row for each sample.
    """
    found = opened(experiment, "task.run", path, rows)
    if found is None:
        return None
    run, used = found
    if rows is not None and not isinstance(run, RowFolder):
        raise spec_error("task.rows", f"{run.path} is a run, which has captures of its own", "leave it out")
    with refused_at("task.run"):
        captures = _captures(run, hook, by_token)
    return Analysis(_noting(experiment, run), run, captures, (used,))


def opened(
    experiment: Experiment, where: str, path: str | None, rows: RowFiles | None = None
) -> tuple[Run, UsedRunRecord] | None:
    """The run that the key `where` names by its directory or name, and how it was found; None: still to be made.

    rows: a directory that is not a run is a folder of files of another program, and which are read

    Raises SpecError if there is none.
    """
    if path is None:
        raise spec_error(
            where,
            f"task={experiment.settings.task.name} reads the captures of another run, and no run is named",
            f"name its directory: {where}=outputs/latest",
        )
    if rows is not None and path not in experiment.runs and not (Path(path) / STATUS).is_file():
        with refused_at("task.rows"):
            folder = open_folder(path, rows)
        return folder, UsedRunRecord(where=where, run=path, path=str(folder.path))
    runs = RunReferences.of(experiment)
    with refused_at(where):
        run, used = runs.open(path), runs.used(where, path)
    return None if run is None or used is None else (run, used)


def _noting(experiment: Experiment, *runs: Run) -> Experiment:
    """The experiment, whose notes say what was read of folders of another program."""
    notes = [run.note for run in runs if isinstance(run, RowFolder)]
    return replace(experiment, notes=(*experiment.notes, *notes))


def _captures(run: Run, name: str | None, by_token: bool) -> dict[str, StoredCapture]:
    """Module path -> capture, for the captures that hold one tensor with one row for each sample, or each token."""
    captures = run.captures
    if name is None and len(captures) != 1:
        hint = "name one: task.capture=NAME" if captures else _run_with_captures(run)
        raise spec_error("task.capture", f"{run.path} captured {', '.join(captures) or 'nothing'}", hint)
    if name is not None and name not in captures:
        raise spec_error("task.capture", f"found {name!r}", nearest(name, captures))
    tensors = [capture for capture in captured_tensors(captures) if name in (None, capture.hook)]
    by_module: dict[str, StoredCapture] = {}
    for capture in tensors:
        if _is_by_sample(capture, by_token):
            by_module[capture.tensor_name] = capture
    if not by_module and isinstance(run, RowFolder):
        raise spec_error(
            "task.rows.each_file",
            f"a file of {run.path} has several rows, and this task compares one row of each sample",
            "say each_file: samples, then each row is a sample",
        )
    if not by_module:
        hint = BY_TOKEN if any(map(is_by_token, tensors)) else "capture with task=predict"
        raise spec_error(
            "task.capture", f"in {run.path} no module of this hook has one row for each sample", hint
        )
    return by_module


def _run_with_captures(run: Run) -> str:
    """What to do where a run has no captures: often it is the newest one, an analysis or the training before it."""
    hint = "give a run that has a hook with action: capture"
    folders = [file.parent.parent for file in run.path.parent.glob(f"*/{CAPTURES}/{INDEX}")]
    for folder in sorted(folders, reverse=True):
        if not folder.is_symlink():
            return f"{hint}; the newest one beside it: task.run={printable(str(folder))}"
    return hint


def _is_by_sample(capture: StoredCapture, by_token: bool) -> bool:
    ids = capture.sample_ids
    columns = [capture.split_numbers, ids]
    if by_token:
        columns += [capture.positions, capture.keys]
    distinct = torch.stack(columns, dim=1).unique(dim=0)
    return bool((ids >= 0).all()) and len(distinct) == len(ids)


def projection_entry(features: Features) -> dict[str, Any]:
    """The entry about the projection of a module's features in a line of metrics; empty without a projection."""
    return {} if features.projection is None else {"projection": str(features.projection)}


def show_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows that begin with a name. Names that do not fit lose their left ends; numbers are never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    taken = 0  # by the columns beside the names
    for column, (heading, *texts) in enumerate(zip(headings, *rows, strict=True)):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
        if column:
            taken += max(map(len, (heading, *texts))) + 3
    room = max(console.width - taken - 2, _LEAST_NAME)
    for name, *texts in rows:
        name = name or "(root)"
        if len(name) > room:
            name = f"…{name[1 - room :]}"
        table.add_row(name, *texts)
    width = console.width
    console.width = max(width, room + taken + 2)
    console.print(table)
    console.width = width


# ---- two runs ------------------------------------------------------------------------------------------------------


def find_both(
    experiment: Experiment, path: str | None, other: str | None, rows: RowFiles | None = None
) -> TwoRuns:
    """Open two runs or two sweeps. Raises SpecError if one does not exist or only one is a sweep.

    rows: one of them, or both, is a folder of files of another program, and which are read
    """
    jobs = _jobs_of_a_sweep(experiment, path)
    other_jobs = _jobs_of_a_sweep(experiment, other)
    if not jobs and not other_jobs:
        found = opened(experiment, "task.run", path, rows)
        other_found = opened(experiment, "task.other", other, rows)
        if found is None or other_found is None:
            return TwoRuns(experiment, {})
        run, used = found
        other_run, other_used = other_found
        with refused_at("task.rows"):
            if isinstance(other_run, RowFolder):
                other_run = other_run.like(run)
            elif isinstance(run, RowFolder):
                run = run.like(other_run)
            elif rows is not None:
                raise spec_error(
                    "task.rows", "both are runs, which have captures of their own", "leave it out"
                )
        noting = _noting(experiment, run, other_run)
        return TwoRuns(noting, {"": (run, other_run)}, runs=(used, other_used))
    if not jobs or not other_jobs:
        sweep, single = (path, other) if jobs else (other, path)
        raise spec_error(
            "task.other",
            f"{sweep} is a sweep, and {single} is not",
            "name two sweeps, or two runs: a job is a run too",
        )
    named = _by_overrides(jobs)
    other_named = _by_overrides(other_jobs)
    if not named.keys() & other_named.keys():
        named = {job.name: job for job in jobs}
        other_named = {job.name: job for job in other_jobs}
    pairs = {
        name: (open_run(job), open_run(other_named[name]))
        for name, job in named.items()
        if name in other_named
    }
    used_runs = [
        UsedRunRecord(where=where, run=str(name), path=str(name))
        for where, name in (("task.run", path), ("task.other", other))
    ]
    return TwoRuns(experiment, pairs, tuple(named.keys() ^ other_named.keys()), tuple(used_runs))


def _jobs_of_a_sweep(experiment: Experiment, name: str | None) -> list[Path]:
    """The directories of a sweep's jobs; none if the name is that of a run."""
    return [] if name is None or name in experiment.runs else _jobs(Path(name))


def _jobs(folder: Path) -> list[Path]:
    """The directories of a sweep's jobs, by number; none if the folder is not that of a sweep."""
    folder = folder.expanduser()
    if not any((folder / name).is_file() for name in (MULTIRUN, SWEEP)):
        return []
    return sorted((file.parent for file in folder.rglob(STATUS)), key=lambda job: (len(str(job)), str(job)))


def _by_overrides(jobs: list[Path]) -> dict[str, Path]:
    """Each job by the overrides that not all jobs of the sweep have; by its directory if these are not unique."""
    typed = [[str(text) for text in read_yaml(job / OVERRIDES, job) or ()] for job in jobs]
    shared = set(typed[0]).intersection(*typed)
    named: dict[str, Path] = {}
    for job, texts in zip(jobs, typed, strict=True):
        differing = [text for text in texts if text not in shared]
        named[", ".join(differing) or job.name] = job
    return named if len(named) == len(jobs) else {job.name: job for job in jobs}

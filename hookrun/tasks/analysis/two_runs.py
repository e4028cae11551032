"""The input of task=compare: two runs, or the jobs of two sweeps in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hookrun.errors import spec_error
from hookrun.spec import Experiment
from hookrun.store.format import MULTIRUN, OVERRIDES, STATUS, SWEEP
from hookrun.store.reader import Run, open_run
from hookrun.store.records import UsedRunRecord
from hookrun.store.stored_config import read_yaml
from hookrun.tasks.analysis.input import opened
from hookrun.tasks.base import Ready


@dataclass(frozen=True)
class TwoRuns(Ready):
    """Two runs to be compared.

    jobs:       name of a job -> its run in each sweep; for two runs one pair with the name ``""``
    unpaired:   the jobs of one of the sweeps only
    found:      how the runs were found, for the record
    are_sweeps: whether they are the jobs of two sweeps
    """

    jobs: Mapping[str, tuple[Run, Run]]
    unpaired: tuple[str, ...]
    found: tuple[UsedRunRecord, ...]
    are_sweeps: bool

    @property
    def runs(self) -> tuple[UsedRunRecord, ...]:
        """The runs that are compared."""
        return self.found


def find_both(experiment: Experiment, path: str | None, other: str | None) -> TwoRuns:
    """Open two runs or two sweeps. Raises SpecError if one does not exist or only one is a sweep."""
    named = {"task.run": path, "task.other": other}
    sweeps = {
        where: _jobs(Path(name).expanduser())
        for where, name in named.items()
        if name is not None and name not in experiment.runs
    }
    are_sweeps = [bool(sweeps.get(where)) for where in named]
    if not any(are_sweeps):
        (run, used), (other_run, other_used) = (opened(experiment, *each) for each in named.items())
        return TwoRuns(experiment, {"": (run, other_run)}, (), (used, other_used), are_sweeps=False)
    if not all(are_sweeps):
        what = f"{path if are_sweeps[0] else other} is a sweep, and {other if are_sweeps[0] else path} is not"
        raise spec_error("task.other", what, "name two sweeps, or two runs: a job is a run too")
    here, there = (_by_overrides(jobs) for jobs in sweeps.values())
    if not here.keys() & there.keys():
        here, there = ({job.name: job for job in jobs} for jobs in sweeps.values())
    pairs = {name: (open_run(job), open_run(there[name])) for name, job in here.items() if name in there}
    found = [UsedRunRecord(where=where, run=str(name), path=str(name)) for where, name in named.items()]
    return TwoRuns(experiment, pairs, tuple(here.keys() ^ there.keys()), tuple(found), are_sweeps=True)


def _jobs(folder: Path) -> list[Path]:
    """The directories of a sweep's jobs, by number; none if the folder is not that of a sweep."""
    if not any((folder / name).is_file() for name in (MULTIRUN, SWEEP)):
        return []
    jobs = (file.parent for file in folder.rglob(STATUS))
    return sorted(jobs, key=lambda job: (len(str(job)), str(job)))


def _by_overrides(jobs: list[Path]) -> dict[str, Path]:
    """Each job by the overrides that not all jobs of the sweep have; by its directory if these are not unique."""
    typed = [[str(text) for text in read_yaml(job / OVERRIDES, job) or ()] for job in jobs]
    names = [
        ", ".join(text for text in texts if not all(text in every for every in typed)) for texts in typed
    ]
    return dict(zip(names if len(set(names)) == len(jobs) else [job.name for job in jobs], jobs, strict=True))

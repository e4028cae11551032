"""The jobs in the directory of a sweep, each identified by the hash of its configuration."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hookrun.errors import spec_error
from hookrun.report.sweep_facts import job_folders
from hookrun.store.files import StoreError
from hookrun.store.format import HYDRA, JOB, MULTIRUN, STATUS
from hookrun.store.lock import LockedError, refuse_held
from hookrun.store.records import JobRecord, Status, read_record
from hookrun.sweeps.stored_sweep import KEY

_FINISHED = ("done", "stopped")
"""The statuses of jobs that are not resumed: a run that a check stopped would stop there again."""


@dataclass(frozen=True)
class KnownJob:
    """A job that was started before.

    name:      its directory, relative to the sweep's
    exit_code: of a job that has finished; None for a job that was killed, failed or was interrupted, and is resumed
    """

    name: str
    exit_code: int | None


class JobDirectories:
    """The jobs in the directory of a sweep that is resumed; each job is taken once.

    begun: the directories of its jobs, relative to the sweep's
    used:  those, and the directories of new jobs
    """

    def __init__(self, folder: Path) -> None:
        """Raises SpecError for a job that cannot be identified, or that another process still runs."""
        self._jobs = defaultdict[str, list[KnownJob]](list)
        self.used = set[str]()
        _refuse_link(folder / MULTIRUN)  # Hydra overwrites it
        for path in sorted(job_folders(folder), key=lambda path: (len(path.name), path.name)):
            name = path.relative_to(folder).as_posix()
            if (path / JOB).exists() or (path / STATUS).exists():
                self.used.add(name)
                config, job = _read(path, name)
                self._jobs[config].append(job)
        self.begun = frozenset(self.used)

    def take(self, config: str) -> KnownJob | None:
        """Take the next job with that hash; None if there is no such job left."""
        jobs = self._jobs.get(config)
        return jobs.pop(0) if jobs else None

    @property
    def left(self) -> int:
        """The number of jobs that were not taken."""
        return sum(map(len, self._jobs.values()))


def refuse_links(folder: Path, name: str) -> None:
    """Raise SpecError where a job would write through a symbolic link in its directory.

    folder: the directory of the sweep
    name:   the directory of the job, relative to `folder`
    """
    name = os.path.normpath(name)
    if os.path.isabs(name) or name.startswith(".."):  # a typed path outside the sweep's directory
        return
    path = folder
    for part in (*Path(name).parts, HYDRA):
        path /= part
        _refuse_link(path)
    for entry in path.iterdir() if path.is_dir() else ():
        _refuse_link(entry)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise spec_error(
            KEY,
            f"{path} is a link, and a resumed sweep does not write through links",
            "replace it with what it leads to, or remove it",
        )


def _read(path: Path, name: str) -> tuple[str, KnownJob]:
    try:
        refuse_held(path)
        if not (path / JOB).exists():
            raise spec_error(
                KEY,
                f"{path} does not say which job it is: it has no {JOB}",
                "an earlier version began it: start the sweep again, in another directory",
            )
        config = str(read_record(path / JOB, JobRecord)["config"])
        status = read_record(path / STATUS, Status) if (path / STATUS).exists() else {}
    except LockedError as error:
        raise spec_error(KEY, str(error), "wait until that job has ended, or end it") from error
    except StoreError as error:
        raise spec_error(KEY, str(error), f"remove {path}: the job is run again then") from error
    is_finished = status.get("status") in _FINISHED
    return config, KnownJob(name, int(status.get("exit_code") or 0) if is_finished else None)

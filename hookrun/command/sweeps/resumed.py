"""The sweep that `resume` names: its directory, the command line that Hydra stored there, and the jobs in it.

The stored command line has the rights of an experiment file and no more: a directory may come from a stranger. A job is
identified by the hash of its configuration.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from hookrun.command.compose import hydra_section
from hookrun.command.compose.hydra import numbered, parse_override
from hookrun.command.compose.overrides import LATEST, RESUME, named_folder
from hookrun.command.sweeps.composed_jobs import SUBDIR, ComposedJob, subdir_of
from hookrun.engine.keys import key_of
from hookrun.errors import Problem, refuse, refused_at, spec_error
from hookrun.store.config import stored as stored_config
from hookrun.store.config.interpolations import literal
from hookrun.store.files import StoreError
from hookrun.store.format import HYDRA, JOB, MULTIRUN, STATUS
from hookrun.store.lock import LockedError, refuse_held
from hookrun.store.records import HydraRecord, JobRecord, Status, checked, read_record
from hookrun.store.run_dir import OUTPUTS, outputs_folder
from hookrun.store.runs import run_folders

SWEEPS = "multirun"
MOST_SHOWN = 200
_SAID_BY_RESUME = ("hydra.mode", "hydra.run.dir", "hydra.sweep.dir")
"""Stored settings that `resume` itself decides."""
_INSIDE = re.compile(r"(?![/.])(?:[\w=,+./-]|\$\{hydra\.job\.(?:num|id)\})+")
"""The `subdir` of a job whose directory is inside that of its sweep."""


def sweep_command(
    folder: Path, name: str | None, groups: Collection[str], typed: Sequence[str], *, has_folder: bool
) -> tuple[str, list[str]]:
    """The name of the root configuration, and the overrides with which the sweep goes on in its directory.

    Those that Hydra stored there are used if only overrides of Hydra's own section were typed; else the sweep was typed
    again.

    folder:     the directory of the sweep
    name:       the typed `--config-name`
    groups:     the existing config groups
    typed:      the typed overrides
    has_folder: whether a `--config-dir` was typed

    Raises SpecError for what an experiment file could not set: it has to be typed again.
    """
    if any(key_of(text) == "hydra.sweep.dir" for text in typed):
        raise spec_error("hydra.sweep.dir", f"is the directory {folder} that {RESUME} names", "leave it out")
    directory = QuotedString(literal(str(folder)), Quote.single).with_quotes()
    overrides = [*typed, f"hydra.sweep.dir={directory}"]
    if not all(key_of(text).startswith("hydra") for text in typed):
        return name or "config", overrides
    file, record = _stored_command(folder)
    for source in record.config_sources:
        if source.provider == "command-line" and source.path and not has_folder:
            path = shlex.quote(source.path[:MOST_SHOWN])  # only the command line chooses which folder is read
            raise spec_error(
                "--config-dir",
                f"the stored sweep had one, {path}, and a file does not choose which folder is read",
                f"type it as well: --config-dir {path} -m {RESUME}={shlex.quote(str(folder))}",
            )
    typed_keys = {*map(key_of, typed), *_SAID_BY_RESUME}
    kept = [text for text in record.hydra_overrides if key_of(text) not in typed_keys]
    swept = {text.partition("=")[0]: "" for text in record.task_overrides}
    problems = list(hydra_section.wrong_params(swept, str(file), groups, "sweep over"))
    for text in kept:
        problems += _wrong_setting(key_of(text), text, file, groups)
    refuse(problems)
    return name or record.config_name or "config", [*record.task_overrides, *kept, *overrides]


def is_sweep(value: str) -> bool:
    """Whether `resume` names the directory of a sweep."""
    return value != LATEST and Path(os.path.expanduser(value), MULTIRUN).is_file()


def sweep_folder(value: str) -> Path:
    """The directory of the sweep that `resume` names. Raises SpecError if it holds no sweep, or a running one."""
    folder = named_folder(value, outputs_folder().with_name(SWEEPS))
    if (folder / MULTIRUN).is_file():
        _refuse_running(folder)
        return folder
    if not folder.is_dir():
        raise spec_error(
            RESUME, f"there is no directory {folder}", f"name one that a sweep left: {RESUME}=DIR"
        )
    if (folder / STATUS).is_file():
        hint = "a single run goes on without -m"
        if (folder.parent / MULTIRUN).is_file():
            hint = f"name the sweep's: {RESUME}={folder.parent}"
        raise spec_error(RESUME, f"{folder} is the directory of a run, not of a sweep", hint)
    raise spec_error(
        RESUME,
        f"{folder} is not the directory of a sweep: it has no {MULTIRUN}",
        f"sweeps are in {SWEEPS}/, single runs in {OUTPUTS}/",
    )


def _refuse_running(folder: Path) -> None:
    """Raise SpecError where a sweep is running in the directory."""
    wait = "wait until that sweep has ended, or end it"
    with refused_at(RESUME), refused_at(RESUME, wait, kinds=LockedError):
        for each in (folder, *folder.parents):
            refuse_held(each)


def _stored_command(folder: Path) -> tuple[Path, HydraRecord]:
    """The file that Hydra stored in the directory, and its section `hydra`. Raises SpecError for another file."""
    file = folder / MULTIRUN
    try:
        content = stored_config.read_yaml(file, folder)
        return file, checked(content["hydra"] if isinstance(content, dict) else None, HydraRecord)
    except (StoreError, KeyError, ValueError) as error:
        _refuse_running(folder)  # a sweep that began just now may be writing the file
        wrong = "is not what Hydra writes" if isinstance(error, ValueError) else "cannot be read"
        raise spec_error(str(file), f"{wrong}: {error}") from error


def _wrong_setting(key: str, text: str, file: Path, groups: Collection[str]) -> Iterator[Problem]:
    """The problem of a stored setting of Hydra that a file may not set."""
    hint = f"type it as well: -m {RESUME}={shlex.quote(str(file.parent))} {shlex.quote(text)}"
    try:
        override = parse_override(text)
        value = "" if override.is_sweep_override() else override.value()
    except HydraException:
        yield Problem(str(file), f"holds {text!r}, which Hydra cannot read", hint)
        return
    if hydra_section.is_open(key) and isinstance(value, str):
        return
    if key == SUBDIR and _INSIDE.fullmatch(str(value)) and ".." not in str(value):
        return
    where = f"{file}: {text[:MOST_SHOWN]}"
    if not key.startswith("hydra."):
        yield Problem(where, "cannot be chosen in a file", hint, place=key)
        return
    section: Any = value
    for part in reversed(key.split(".")[1:]):
        section = {part: section}
    for problem in hydra_section.wrong_settings(section, groups):
        yield Problem(where, problem.what, hint, place=key)


_FINISHED = ("done", "stopped")
"""The statuses of jobs that are not resumed: a run that a check stopped would stop there again."""


class JobDirectories:
    """The jobs in the directory of a sweep that is resumed; each job is taken once.

    jobs: directory, relative to the sweep's -> the hash of its job, and the exit code of one that has finished
    """

    def __init__(self, folder: Path) -> None:
        """Raises SpecError for a job that cannot be identified, or that another process still runs."""
        self._folder = folder
        _refuse_link(folder / MULTIRUN)  # Hydra overwrites it
        self.jobs = dict[str, tuple[str, int | None]]()
        self._left = defaultdict[str, list[str]](list)
        for path in sorted(run_folders(folder), key=lambda path: (len(path.name), path.name)):
            if (path / JOB).exists() or (path / STATUS).exists():
                name = path.relative_to(folder).as_posix()
                config, code = _stored_job(path)
                self.jobs[name] = config, code
                self._left[config].append(name)
        self._used = set(self.jobs)

    def place(self, jobs: Sequence[ComposedJob]) -> None:
        """Set the directories of the jobs: of one that was started before its own, of a new one the next free one.

        Raises SpecError if there is none, or if a job would write through a symbolic link.
        """
        new: list[tuple[ComposedJob, DictConfig]] = []
        for job in jobs:
            if names := self._left[job.config]:
                job.name = names.pop(0)
                job.exit_code = self.jobs[job.name][1]
                job.number = int(job.name) if job.name.isdecimal() else job.number
            elif job.config:
                new.append((job, job.configuration()))
        # first those whose own directory is free
        for job, config in sorted(new, key=lambda pair: subdir_of(pair[1]) in self._used):
            while (name := subdir_of(config)) in self._used:
                job.number += 1
                if subdir_of(numbered(config, job.number)) == name:
                    raise spec_error(
                        SUBDIR,
                        f"{name} is the directory of a job with another configuration",
                        "let it hold ${hydra.job.num}",
                    )
            self._used.add(name)
            job.name = name
        for job in jobs:
            if job.name is not None and job.exit_code is None:
                refuse_links(self._folder, job.name)

    @property
    def left(self) -> int:
        """The number of jobs that were not taken."""
        return sum(map(len, self._left.values()))


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
            RESUME,
            f"{path} is a link, and a resumed sweep does not write through links",
            "replace it with what it leads to, or remove it",
        )


def _stored_job(path: Path) -> tuple[str, int | None]:
    """The hash of a job's configuration, and the exit code; None for one that was killed, failed or interrupted."""
    with (
        refused_at(RESUME, f"remove {path}: the job is run again then"),
        refused_at(RESUME, "wait until that job has ended, or end it", kinds=LockedError),
    ):
        refuse_held(path)
        if not (path / JOB).exists():
            raise spec_error(
                RESUME,
                f"{path} does not say which job it is: it has no {JOB}",
                "an earlier version began it: start the sweep again, in another directory",
            )
        config = str(read_record(path / JOB, JobRecord)["config"])
        status = read_record(path / STATUS, Status) if (path / STATUS).exists() else {}
    is_finished = status.get("status") in _FINISHED
    return config, int(status.get("exit_code") or 0) if is_finished else None

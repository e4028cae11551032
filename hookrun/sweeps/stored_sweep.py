"""The sweep that `resume` names: its directory, and the command line that Hydra stored there.

The stored command line has the rights of an experiment file and no more: a directory may come from a stranger.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from hookrun.compose import hydra_section
from hookrun.compose.hydra import parse_override
from hookrun.errors import Problem, SpecError
from hookrun.store import stored_config
from hookrun.store.files import StoreError
from hookrun.store.format import MULTIRUN, STATUS
from hookrun.store.lock import LockedError, refuse_held
from hookrun.store.outputs import OUTPUTS, outputs_folder
from hookrun.store.records import HydraRecord, checked

KEY = "resume"
LATEST = "latest"
SWEEPS = "multirun"
MOST_SHOWN = 200
_SAID_BY_RESUME = ("hydra.mode", "hydra.run.dir", "hydra.sweep.dir")
"""Stored settings that `resume` itself decides."""
_SUBDIR = "hydra.sweep.subdir"
_INSIDE = re.compile(r"(?![/.])(?:[\w=,+./-]|\$\{hydra\.job\.(?:num|id)\})+")
"""The `subdir` of a job whose directory is inside that of its sweep."""


@dataclass(frozen=True)
class StoredSweep:
    """The command line of a sweep, as Hydra stored it, unchecked.

    file:   the file that it was read from
    record: Hydra's section
    """

    file: Path
    record: HydraRecord

    @property
    def config_name(self) -> str:
        """The name of the root configuration."""
        return self.record.config_name or "config"

    def refuse_config_dir(self) -> None:
        """Raise SpecError where the sweep had a `--config-dir`: only the command line chooses which folder is read."""
        sources = self.record.config_sources
        found = [each.path for each in sources if each.provider == "command-line" and each.path]
        if found:
            folder = shlex.quote(found[0][:MOST_SHOWN])
            hint = f"type it as well: --config-dir {folder} -m {KEY}={shlex.quote(str(self.file.parent))}"
            what = f"the stored sweep had one, {folder}, and a file does not choose which folder is read"
            raise SpecError([Problem("--config-dir", what, hint)])

    def overrides(self, groups: Collection[str], typed: Sequence[str]) -> list[str]:
        """The stored overrides: those of the experiment, then those of Hydra's section.

        Overrides of the directory, and those whose keys are typed again, are left out.

        groups: the existing config groups
        typed:  the overrides of the command line, all of Hydra's section

        Raises SpecError for an override that an experiment file could not set: it has to be typed again.
        """
        problems, kept = list[Problem](), list[str]()
        typed_keys = set(map(_key, typed))
        for text in self.record.task_overrides:
            key = text.partition("=")[0]
            problems += hydra_section.wrong_params({key: ""}, str(self.file), groups, "sweep over")
        for text in self.record.hydra_overrides:
            key = _key(text)
            if key not in _SAID_BY_RESUME and key not in typed_keys:
                kept.append(text)
                problems += _wrong_setting(key, text, self.file, groups)
        if problems:
            raise SpecError(problems)
        return [*self.record.task_overrides, *kept]


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def is_sweep(value: str) -> bool:
    """Whether `resume` names the directory of a sweep."""
    return value != LATEST and (_path(value) / MULTIRUN).is_file()


def sweep_folder(value: str) -> Path:
    """The directory of the sweep that `resume` names. Raises SpecError if it holds no sweep, or a running one."""
    folder = _newest() if value == LATEST else _path(value)
    if not (folder / MULTIRUN).is_file():
        raise SpecError([_no_sweep(folder)])
    _refuse_running(folder)
    return folder


def _refuse_running(folder: Path) -> None:
    """Raise SpecError where a sweep is running in the directory."""
    try:
        for each in (folder, *folder.parents):
            refuse_held(each)
    except LockedError as error:
        raise SpecError([Problem(KEY, str(error), "wait until that sweep has ended, or end it")]) from error
    except StoreError as error:
        raise SpecError([Problem(KEY, str(error))]) from error


def _path(value: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(value)))


def _newest() -> Path:
    sweeps = outputs_folder().parent / SWEEPS
    found = [file for file in sweeps.glob(f"*/{MULTIRUN}") if not file.parent.is_symlink()]
    if not found:
        raise SpecError([Problem(KEY, f"there is no sweep in {sweeps}", f"name its directory: {KEY}=DIR")])
    return max(found, key=lambda file: (file.stat().st_mtime_ns, file.parent.name)).parent


def _no_sweep(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem(KEY, f"there is no directory {folder}", f"name one that a sweep left: {KEY}=DIR")
    if (folder / STATUS).is_file():
        sweep = folder.parent / MULTIRUN
        hint = (
            f"name the sweep's: {KEY}={folder.parent}"
            if sweep.is_file()
            else "a single run goes on without -m"
        )
        return Problem(KEY, f"{folder} is the directory of a run, not of a sweep", hint)
    hint = f"sweeps are in {SWEEPS}/, single runs in {OUTPUTS}/"
    return Problem(KEY, f"{folder} is not the directory of a sweep: it has no {MULTIRUN}", hint)


def stored_sweep(folder: Path) -> StoredSweep:
    """The sweep that is stored in the directory. Raises SpecError where it cannot be read."""
    file = folder / MULTIRUN
    try:
        content = stored_config.read_yaml(file, folder)
        return StoredSweep(
            file, checked(content["hydra"] if isinstance(content, dict) else None, HydraRecord)
        )
    except (StoreError, KeyError) as error:
        _refuse_running(folder)  # a sweep that began just now may be writing the file
        raise SpecError([Problem(str(file), f"cannot be read: {error}")]) from error
    except ValueError as error:
        _refuse_running(folder)
        raise SpecError([Problem(str(file), f"is not what Hydra writes: {error}")]) from error


def in_folder(folder: Path, overrides: Sequence[str]) -> str:
    """The override that sets the directory of the sweep. Raises SpecError where another directory was typed."""
    if any(text.lstrip("+").startswith("hydra.sweep.dir=") for text in overrides):
        what = f"is the directory {folder} that {KEY} names"
        raise SpecError([Problem("hydra.sweep.dir", what, "leave it out")])
    name = str(folder).replace("${", "\\${")
    return f"hydra.sweep.dir={QuotedString(name, Quote.single).with_quotes()}"


def _wrong_setting(key: str, text: str, file: Path, groups: Collection[str]) -> Iterator[Problem]:
    """The problem of a stored setting of Hydra that a file may not set."""
    hint = f"type it as well: -m {KEY}={shlex.quote(str(file.parent))} {shlex.quote(text)}"
    try:
        override = parse_override(text)
        value = "" if override.is_sweep_override() else override.value()
    except HydraException:
        yield Problem(str(file), f"holds {text!r}, which Hydra cannot read", hint)
        return
    if hydra_section.is_open(key) and isinstance(value, str):
        return
    if key == _SUBDIR and _INSIDE.fullmatch(str(value)) and ".." not in str(value):
        return
    section: Any = value
    for part in reversed(key.split(".")[1:]):
        section = {part: section}
    for problem in hydra_section.wrong_settings(section, groups) if key.startswith("hydra.") else [None]:
        what = problem.what if problem is not None else "cannot be chosen in a file"
        yield Problem(f"{file}: {text[:MOST_SHOWN]}", what, hint)

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
from hookrun.config.interpolations import literal
from hookrun.errors import Problem, SpecError, spec_error
from hookrun.store import stored_config
from hookrun.store.files import StoreError
from hookrun.store.format import MULTIRUN, STATUS
from hookrun.store.lock import LockedError, refuse_held
from hookrun.store.records import HydraRecord, checked
from hookrun.store.run_dir import OUTPUTS, outputs_folder

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
    """A sweep that is resumed.

    folder:   its directory
    is_typed: whether the sweep was typed again, so that the command line that Hydra stored there is not used
    """

    folder: Path
    is_typed: bool

    def command(
        self, name: str | None, groups: Collection[str], typed: Sequence[str], *, has_folder: bool
    ) -> tuple[str, list[str]]:
        """The name of the root configuration, and the overrides with which the sweep goes on in its directory.

        name:       the typed `--config-name`
        groups:     the existing config groups
        typed:      the typed overrides, all of Hydra's section unless `is_typed`
        has_folder: whether a `--config-dir` was typed

        Raises SpecError for what an experiment file could not set: it has to be typed again.
        """
        if any(text.lstrip("+").startswith("hydra.sweep.dir=") for text in typed):
            raise spec_error(
                "hydra.sweep.dir", f"is the directory {self.folder} that {KEY} names", "leave it out"
            )
        folder = QuotedString(literal(str(self.folder)), Quote.single).with_quotes()
        overrides = [*typed, f"hydra.sweep.dir={folder}"]
        if self.is_typed:
            return name or "config", overrides
        file, record = _stored_command(self.folder)
        sources = record.config_sources
        found = [each.path for each in sources if each.provider == "command-line" and each.path]
        if found and not has_folder:  # only the command line chooses which folder is read
            theirs = shlex.quote(found[0][:MOST_SHOWN])
            raise spec_error(
                "--config-dir",
                f"the stored sweep had one, {theirs}, and a file does not choose which folder is read",
                f"type it as well: --config-dir {theirs} -m {KEY}={shlex.quote(str(self.folder))}",
            )
        typed_keys = {_key(text) for text in typed}.union(_SAID_BY_RESUME)
        kept = [text for text in record.hydra_overrides if _key(text) not in typed_keys]
        problems = list[Problem]()
        for text in record.task_overrides:
            key = {text.partition("=")[0]: ""}
            problems += hydra_section.wrong_params(key, str(file), groups, "sweep over")
        for text in kept:
            problems += _wrong_setting(_key(text), text, file, groups)
        if problems:
            raise SpecError(problems)
        return name or record.config_name or "config", [*record.task_overrides, *kept, *overrides]


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def is_sweep(value: str) -> bool:
    """Whether `resume` names the directory of a sweep."""
    return value != LATEST and Path(os.path.expanduser(value), MULTIRUN).is_file()


def sweep_folder(value: str) -> Path:
    """The directory of the sweep that `resume` names. Raises SpecError if it holds no sweep, or a running one."""
    folder = Path(os.path.abspath(os.path.expanduser(value)))
    if value == LATEST:
        sweeps = outputs_folder().parent / SWEEPS
        files = [file for file in sweeps.glob(f"*/{MULTIRUN}") if not file.parent.is_symlink()]
        if not files:
            raise spec_error(KEY, f"there is no sweep in {sweeps}", f"name its directory: {KEY}=DIR")
        folder = max(files, key=lambda file: (file.stat().st_mtime_ns, file.parent.name)).parent
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
        raise spec_error(KEY, str(error), "wait until that sweep has ended, or end it") from error
    except StoreError as error:
        raise spec_error(KEY, str(error)) from error


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

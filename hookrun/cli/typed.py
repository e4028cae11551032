"""Root keys that only the command line has, taken out of the typed overrides: no file can set them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException

from hookrun.cli.hydra import parse_override
from hookrun.errors import Problem, SpecError

RESUME, ANYWAY, LATEST = "resume", "resume_anyway", "latest"


def take(key: str, overrides: Sequence[str]) -> tuple[Any, list[str]]:
    """The typed value of the root key, with or without `+`, or None; and the other overrides.

    Raises SpecError where the key is given twice, or not with a single value.
    """
    pattern = re.compile(rf"\+{{0,2}}{key}=")
    found = [text for text in overrides if pattern.match(text)]
    others = [text for text in overrides if not pattern.match(text)]
    if not found:
        return None, others
    if len(found) > 1:
        raise SpecError([Problem(key, f"is given {len(found)} times", "give it once")])
    text = found[0].lstrip("+")
    try:
        override = parse_override(text)
        value = None if override.is_sweep_override() else override.value()
    except HydraException:
        value = text.partition("=")[2]  # such as a path with characters that are special to Hydra
    if value is None or isinstance(value, dict | list):
        raise SpecError([Problem(key, f"found {text.partition('=')[2]!r}, expected one value", "")])
    return value, others


def take_flag(key: str, overrides: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the root key was typed as true; and the other overrides. Raises SpecError for what is not a boolean."""
    value, others = take(key, overrides)
    if value is not None and not isinstance(value, bool):
        raise SpecError([Problem(key, f"found {value!r}, expected true or false", f"write {key}=true")])
    return bool(value), others


@dataclass(frozen=True)
class Resume:
    """The typed `resume` and `resume_anyway`.

    name:   a directory, or `latest`
    anyway: whether to resume even if the configuration, model, data or version has changed
    """

    name: str
    anyway: bool = False


def take_resume(overrides: Sequence[str]) -> tuple[Resume | None, list[str]]:
    """The typed `resume`, or None, and the other overrides. Raises SpecError."""
    name, others = take(RESUME, overrides)
    anyway, others = take_flag(ANYWAY, others)
    if name is None:
        if anyway:
            raise SpecError([Problem(ANYWAY, "goes with resume=DIR", "name the directory of the run")])
        return None, others
    if isinstance(name, bool) or name == "":
        raise SpecError([Problem(RESUME, f"found {name!r}, expected a directory", "for one: resume=latest")])
    return Resume(str(name), anyway), others

"""Exceptions of Hydra and OmegaConf as problems; problems that name the interpolation of a wrong value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hookrun.compose.check import (
    Composition,
    is_config_name,
    no_such_config,
    without_header,
    wrong_overrides,
)
from hookrun.compose.overrides import INTERPOLATION
from hookrun.config.interpolations import guarded
from hookrun.config.yaml_files import load
from hookrun.errors import HookrunError, Problem, Refusal, SpecError, nearest

MOST_SHOWN = 100
"""Characters of an interpolation that are shown."""
_TWICE = re.compile(
    r"Multiple values for (\S+)\. To override|(\S+) appears more than once in the final defaults list"
)


@contextmanager
def explained(asked: Composition | None = None) -> Iterator[None]:
    """Convert any exception while Hydra composes or resolves a configuration to SpecError.

    No user code runs in the block: every exception is a mistake in the command line or in a file. The overrides are
    checked only after Hydra has refused them, so that a correct command line loses no time.
    """
    try:
        with guarded():
            yield
    except (HookrunError, BrokenPipeError):
        raise
    except Exception as error:
        raise SpecError(_mistakes(error, asked)) from error


def _mistakes(error: Exception, asked: Composition | None) -> list[Problem]:
    if asked is None or not isinstance(error, HydraException | ValueError | TypeError):
        return [_problem(error, asked)]
    try:
        problems = wrong_overrides(asked)
    except HookrunError:
        raise
    except Exception as of_files:  # the files do not compose, even without the overrides
        return [_problem(of_files, asked)]
    return problems or [_problem(error, asked)]


def _problem(error: Exception, asked: Composition | None) -> Problem:
    match error:
        case MissingConfigException(missing_cfg_file=str(path)) if asked:
            if is_config_name(path, asked):
                return no_such_config(path, asked)
            if error.options is None:
                hint = "a defaults list holds items like `- override /model: resnet18`"
                return Problem(_named_file(error, asked), f"Could not load {path!r}", hint)
            return no_such_config(path, asked)
        case OmegaConfBaseException():
            return _value(error)
        case RecursionError():
            what = "something contains itself, through an alias, an interpolation or a defaults list"
            return Problem("", what, "break the cycle")
        case OSError(filename=str(file)):
            return Problem(file, error.strerror or str(error))
        case HydraException() | ValueError() | OSError() | UserWarning():
            return _of_hydra(error, asked)
    return Problem("", f"{type(error).__name__}: {error}", "HYDRA_FULL_ERROR=1 shows the traceback")


def _value(error: OmegaConfBaseException) -> Problem:
    key, what = str(error.full_key or ""), str(error.msg or error).splitlines()[0]
    hint = ""
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "has no value yet (???)", f"give it one: {key}=VALUE")
    if isinstance(error, GrammarParseError):
        hint = INTERPOLATION
    return Problem(key, what, hint)


def _of_hydra(error: Exception, asked: Composition | None) -> Problem:
    """The problem with Hydra's own message, or with that of the OmegaConf error behind it, at the file it names."""
    file = _named_file(error, asked)
    below = error.__cause__ or error.__context__
    if isinstance(below, OmegaConfBaseException):
        problem = _value(below)
        if file and not problem.where:  # a section that is a list: OmegaConf names no key
            return _list_for_mapping(file) or Problem(file, problem.what, problem.hint)
        return Problem(file, f"{problem.what} (at {problem.where})", problem.hint) if file else problem
    message = " ".join(str(error).split()) or type(error).__name__
    if twice := _TWICE.match(message):
        group = twice[1] or twice[2]
        hint = f"a defaults list that chooses it again needs the word `override`: `- override /{group}: NAME`"
        return Problem(group, "is chosen twice, by hookrun's configuration and by a defaults list", hint)
    if asked is None or not file or not isinstance(error, ConfigCompositionException):
        return Problem(file, message)
    if "experiment" in Path(file).parts and not _has_header(file):
        return without_header(file)
    return Problem(file, message, _near_groups(file, asked))


def _list_for_mapping(file: str) -> Problem | None:
    """The problem of the first section of the file that is a list; every section of a configuration is a mapping."""
    content = load(Path(file))
    keys = content if OmegaConf.is_dict(content) else {}
    found = next((str(key) for key in keys if key != "defaults" and OmegaConf.is_list(keys[key])), None)
    if found is None:
        return None
    hint = (
        "each hook has a name: NAME: {select: …, hook: …, action: …}"
        if found == "hooks"
        else "write key: value"
    )
    return Problem(f"{file}: {found}", "found a list, expected a mapping", hint)


def _named_file(error: Exception, asked: Composition | None) -> str:
    """The path of the first config file that Hydra's message names, such as ``'experiment/mine'``; else empty."""
    words = (word.strip("'\":,.;") for word in str(error).split())
    folders = asked.app.folders() if asked else []
    files = (folder / f"{word}.yaml" for word in words if "/" in word for folder in folders)
    return next((str(file) for file in files if file.is_file()), "")


def _has_header(file: str) -> bool:
    return any(line.startswith("# @package") for line in Path(file).read_text(encoding="utf-8").splitlines())


def _near_groups(file: str, asked: Composition) -> str:
    """The nearest names for each group that the file's defaults list overrides and that does not exist."""
    groups = asked.app.config_loader.list_groups("")
    defaults = OmegaConf.select(load(Path(file)), "defaults") or []
    named = [
        str(key).split()[-1].partition("@")[0] for item in defaults if OmegaConf.is_dict(item) for key in item
    ]
    absolute = [name[1:] for name in named if name.startswith("/")]
    return "; ".join(nearest(group, groups) for group in absolute if group.partition("/")[0] not in groups)


@contextmanager
def origins_told(cfg: DictConfig) -> Iterator[None]:
    """Add to each problem raised in the block the interpolation of `cfg` from which the wrong value came."""
    try:
        yield
    except Refusal as error:
        written: Any = OmegaConf.to_container(cfg, resolve=False)
        origins = dict(_interpolations(written, ""))
        if not origins:
            raise
        raise type(error)([_told(each, origins) for each in error.errors], error.notes) from error


def _interpolations(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """The key path and the text of every value that holds an interpolation."""
    if isinstance(node, str) and "${" in node:
        yield path, node if len(node) <= MOST_SHOWN else f"{node[:MOST_SHOWN]}…"
    members = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in members:
        yield from _interpolations(value, f"{path}.{key}" if path else str(key))


def _told(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem with the interpolation at its key path added, or at the nearest key path above it."""
    place = problem.where
    while place and place not in origins:
        place = place.rpartition(".")[0]
    if not place:
        return problem
    if place != problem.where:
        return replace(problem, what=f"{problem.what} ({place} is {origins[place]})")
    found, colon, expected = problem.what.partition(": ")
    if colon and found.startswith("found "):
        return replace(problem, what=f"{found} (from {origins[place]}): {expected}")
    found, comma, expected = problem.what.partition(", ")
    if comma and found.startswith("found "):
        return replace(problem, what=f"{found} (from {origins[place]}), {expected}")
    return replace(problem, what=f"{problem.what} (from {origins[place]})")

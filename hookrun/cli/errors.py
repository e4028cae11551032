"""Turns exceptions of Hydra and OmegaConf into problems: where, what was asked, the nearest names, the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hookrun.cli.check import (
    Composition,
    Mistakes,
    is_config_name,
    no_such_config,
    without_header,
    wrong_overrides,
)
from hookrun.cli.overrides import INTERPOLATION
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.interpolations import guarded
from hookrun.yaml_files import load


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
        mistakes = _mistakes(error, asked)
        if mistakes.right is None:
            raise SpecError(mistakes.problems) from error
        raise WrongOverrides(mistakes.problems, mistakes.right) from error


class WrongOverrides(SpecError):
    """Some overrides are wrong; the correct ones, `right`, compose by themselves and can be checked further."""

    def __init__(self, errors: Sequence[Problem], right: Sequence[str]) -> None:
        super().__init__(errors)
        self.right = list(right)
        self.args = (self.errors, self.right)


def _mistakes(error: Exception, asked: Composition | None) -> Mistakes:
    if asked is None or not isinstance(error, HydraException | ValueError | TypeError):
        return Mistakes([_problem(error, asked)])
    try:
        mistakes = wrong_overrides(asked)
    except HookrunError:
        raise
    except Exception as of_files:  # the files do not compose, even without the overrides
        return Mistakes([_problem(of_files, asked)])
    return mistakes if mistakes.problems else Mistakes([_problem(error, asked)])


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
        return Problem(file, f"{problem.what} (at {problem.where})", problem.hint) if file else problem
    message = " ".join(str(error).split()) or type(error).__name__
    if asked is None or not file or not isinstance(error, ConfigCompositionException):
        return Problem(file, message)
    if "experiment" in Path(file).parts and not _has_header(file):
        return without_header(file)
    return Problem(file, message, _near_groups(file, asked))


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

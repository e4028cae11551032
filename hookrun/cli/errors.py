"""Exceptions of Hydra, OmegaConf and YAML as problems: where, what was asked, the nearest names, the next step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

from hookrun.broken_yaml import problem_of_yaml
from hookrun.cli.hydra_core import App
from hookrun.cli.keys import undeletable_key, unknown_keys
from hookrun.cli.overrides import quoted
from hookrun.errors import HookrunError, Problem, SpecError, nearest

_INTERPOLATION = r"`${` begins an interpolation; for the characters themselves write \${"


@dataclass(frozen=True)
class Asked:
    """What was to be composed."""

    app: App
    config_name: str
    overrides: list[str]
    mode: RunMode = RunMode.RUN


@contextmanager
def explained(asked: Asked | None = None) -> Iterator[None]:
    """Raise SpecError for whatever goes wrong while Hydra composes or resolves a configuration.

    Nothing of a user's runs there: every exception stands for a mistake in what was typed or in a file.
    """
    try:
        yield
    except (HookrunError, BrokenPipeError):
        raise
    except Exception as error:
        raise SpecError(_problems(error, asked)) from error


def _problems(error: Exception, asked: Asked | None) -> list[Problem]:
    match error:
        case OverrideParseException():
            return [_broken_override(error, asked)]
        case MissingConfigException():
            return [_missing_config(error, asked)]
        case ConfigCompositionException() if str(error).strip():
            return _composition(error, asked)
        case HydraException() if isinstance(error.__cause__, OmegaConfBaseException):
            return [_value(error.__cause__)]
        case OmegaConfBaseException():
            return [_value(error)]
        case UserWarning():
            return [_missing_folder(error)]
        case yaml.YAMLError():
            return [problem_of_yaml(error)]
        case ValueError() if asked and "Config group override must be" in str(error):
            return _nameless_choices(asked)
    return [_other(error)]


def _broken_override(error: OverrideParseException, asked: Asked | None) -> Problem:
    text = error.override
    if "=" not in text and not text.startswith("~"):
        experiments = asked.app.options("experiment") if asked else []
        hint = f"did you mean experiment={text}?" if text in experiments else "for one: experiment=clip_fc"
        return Problem(text, "is not of the form key=value", hint)
    what = error.message.splitlines()[0].removeprefix("LexerNoViableAltException: ")
    if "${" in text:
        return Problem(text, what, _INTERPOLATION)
    fixed = quoted(text)
    hint = "brackets, braces, commas, parentheses and quotes mean something to Hydra: "
    hint += f"put the value in quotes of its own: {fixed}" if fixed else "check that they are closed"
    return Problem(text, what, hint)


def _missing_config(error: MissingConfigException, asked: Asked | None) -> Problem:
    path = error.missing_cfg_file or ""
    group, _, name = path.rpartition("/")
    if group.startswith("hydra/") and error.options:
        hint = f"a {group.partition('/')[2]} of another package must be installed first"
        return Problem(group, f"there is no {name!r}; there are: {', '.join(error.options)}", hint)
    folders = asked.app.folders() if asked else []
    if (
        "/" in group and asked and asked.app.options(group.partition("/")[0])
    ):  # the folder may be what is wrong
        group, _, name = path.partition("/")
        options = asked.app.options(group)
    else:
        options = list(error.options or []) or (asked.app.options(group) if asked else [])
    misnamed = next((file for folder in folders if (file := folder / f"{path}.yml").is_file()), None)
    if misnamed is not None:
        return Problem(str(misnamed), "configuration files end in .yaml", f"rename it to {name}.yaml")
    if "Could not load" in str(error):
        parent = re.match(r"In '([^']+)': ", str(error))
        what = _first_lines(error).removeprefix(parent[0] if parent else "")
        hint = "a defaults list holds items like `- override /model: resnet18`"
        return Problem(_file(parent[1], asked) if parent else path, what, hint)
    if not group:
        options = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    near = nearest(name, options)
    there_are = f"there are: {', '.join(options)}; " if near.startswith("did you mean") else ""
    hint = f"{there_are}looked in {', '.join(str(folder / group) for folder in folders)}"
    return Problem(group or "--config-name", f"there is no {name!r}; {near}", hint)


def _composition(error: ConfigCompositionException, asked: Asked | None) -> list[Problem]:
    text = str(error)
    if (found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", text)) is not None:
        return [_sweep_without_multirun(found[1])]
    if (found := re.match(r"Could not append to config\. An item is already at '(.*)'", text)) is not None:
        return [Problem(found[1], "`+` adds a key, and this one is there already", "leave the `+` out")]
    found = re.match(r"Could not delete from config\. '(.*)' does not exist", text)
    if asked and found is not None:
        return [undeletable_key(asked.app, asked.config_name, asked.overrides, asked.mode, found[1])]
    if asked and isinstance(error.__cause__, OmegaConfBaseException) and "To append to your config" in text:
        return unknown_keys(asked.app, asked.config_name, asked.overrides, asked.mode)
    if (found := re.match(r"In '([^']+)': \w+ raised while composing config:\n(.*)", text)) is not None:
        key = re.search(r"full_key: (\S+)", text)
        return [Problem(_file(found[1], asked), found[2] + (f" (at {key[1]})" if key else ""))]
    if (found := re.match(r"In '([^']+)': (.*)", text)) is not None:
        if "@experiment." in text:  # where an override of its defaults list landed, too
            return [without_header(_file(found[1], asked))]
        group = re.search(r"'([^'@]+)'(?:\. No match| exists to override)", text)
        hint = nearest(group[1], asked.app.config_loader.list_groups("")) if group and asked else ""
        return [Problem(_file(found[1], asked), _first_lines(error).removeprefix(f"In '{found[1]}': "), hint)]
    if isinstance(error.__cause__, OmegaConfBaseException):
        return [Problem("", f"{_first_lines(error)}: {str(error.__cause__).splitlines()[0]}")]
    return [Problem("", _first_lines(error))]


def _sweep_without_multirun(text: str) -> Problem:
    key, _, value = text.partition("=")
    hint = "put -m first to run one job for each"
    if re.fullmatch(r"[^()]*", value):
        hint += f"; a list is {key}=[{value}]"
        hint += f"; one text with commas is {quoted(text)}" if quoted(text) else ""
    return Problem(key.lstrip("+"), f"{value!r} stands for several values", hint)


def _value(error: OmegaConfBaseException) -> Problem:
    what = str(error.msg or error).splitlines()[0]
    hint = ""
    if isinstance(error, MissingMandatoryValue):
        return Problem(str(error.full_key), "has no value yet (???)", f"give it one: {error.full_key}=VALUE")
    if isinstance(error, GrammarParseError):
        hint = _INTERPOLATION
    elif "Environment variable" in what:
        hint = "set it, or give a default after a comma: ${oc.env:NAME,default}"
    return Problem(str(error.full_key or ""), what, hint)


def _nameless_choices(asked: Asked) -> list[Problem]:
    """Overrides like ``train=3``: Hydra's message does not say which of them it means."""
    groups = asked.app.config_loader.list_groups("")
    pairs = [text.partition("=")[::2] for text in asked.overrides]
    return [
        Problem(key, f"found {value!r}, expected a name", nearest(value, asked.app.options(key)))
        for key, value in pairs
        if key in groups and value not in asked.app.options(key) and value[:1] not in ("{", "[")
    ]


def _missing_folder(error: UserWarning) -> Problem:
    found = re.search(r"path=(.*) is not available", str(error))
    folder = found[1] if found else str(error)
    return Problem("hydra.searchpath", f"there is no folder {folder}", "a folder is file:///absolute/path")


def _other(error: Exception) -> Problem:
    if isinstance(error, RecursionError):
        return Problem(
            "", "something contains itself, through an alias or an interpolation", "break the cycle"
        )
    if isinstance(error, OSError) and error.filename:
        return Problem(str(error.filename), error.strerror or str(error))
    if isinstance(error, ValueError | OSError):
        return Problem("", str(error))
    return Problem("", f"{type(error).__name__}: {error}", "HYDRA_FULL_ERROR=1 shows the traceback")


def without_header(file: str) -> Problem:
    """The problem of an experiment file that does not say where its keys belong."""
    what = "its keys land under `experiment`, where nothing reads them"
    return Problem(file, what, "make `# @package _global_` its first line")


def _file(config: str, asked: Asked | None) -> str:
    """The file of a config that Hydra names like ``experiment/mine``."""
    paths = [folder / f"{config}.yaml" for folder in (asked.app.folders() if asked else [])]
    return next((str(path) for path in paths if path.is_file()), config)


def _first_lines(error: Exception) -> str:
    """Hydra's message up to its list of search paths, on one line."""
    text = re.split(r"\n\s*(?:Config )?[Ss]earch path:", str(error))[0]
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())

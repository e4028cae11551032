"""The flags of a command line; for an unknown flag, the override that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra.types import RunMode

from hookrun.compose.errors import key_paths
from hookrun.compose.hydra import App, argument_parser, conf_dir, opened
from hookrun.compose.overrides import GROUPS, meant
from hookrun.config import ROOT_KEYS
from hookrun.errors import Problem, SpecError, spec_error

_WRITTEN = "settings are written key=value, without dashes"


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags and the overrides. Raises SpecError, and SystemExit after ``--version``."""
    parser = argument_parser()
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    flags = [place for place, word in enumerate(arguments[:end]) if word[:1] == "-" and word != "-"]
    if unknown := [place for place in flags if _is_unknown(arguments[place], known)]:
        with opened(conf_dir()) as app:
            raise SpecError([_not_a_flag(arguments[place:], known, app) for place in unknown])
    try:
        args, others = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        flag = (error.argument_name or "").partition("/")[0]
        joined = next((word for word in arguments if word.startswith(f"{flag}=")), "")
        hint = "--help shows some uses"
        if flag in known and known[flag].choices:
            hint = f"it takes {', '.join(known[flag].choices or ())}"
        elif flag in known and known[flag].nargs == 0 and joined:
            hint = f"put a space there: {joined.replace('=', ' ', 1)}"
        raise spec_error(flag, error.message, hint) from None
    if others:
        raise SpecError([Problem(text, "is not a flag", _WRITTEN) for text in others])
    return args


def _is_unknown(word: str, known: Mapping[str, argparse.Action]) -> bool:
    if word.partition("=")[0] in known:
        return False
    with_choice = known.get(word[:2])  # a short flag with its choice attached: -cjob
    return with_choice is None or word[2:] not in (with_choice.choices or ())


def _not_a_flag(words: Sequence[str], known: Mapping[str, argparse.Action], app: App) -> Problem:
    """The problem of the first word, of which the second may be the value: ``--experiment clip_fc``."""
    name, equals, value = words[0].partition("=")
    if not equals and len(words) > 1 and "=" not in words[1] and words[1][:1] != "-":
        return Problem(f"{name} {words[1]}", "is not a flag", _hint(name, words[1], known, app))
    return Problem(words[0], "is not a flag", _hint(name, value if equals else None, known, app))


def _hint(name: str, value: str | None, known: Mapping[str, argparse.Action], app: App) -> str:
    key = name.lstrip("-")
    if key.partition(".")[0] in (*ROOT_KEYS, "experiment"):
        return f"{_WRITTEN}: {key}={value or ('NAME' if key in GROUPS else 'VALUE')}"
    if value is None and (override := meant(key, app)):
        return f"{_WRITTEN}: {override}"
    if f"--{key}" in known:
        return f"did you mean --{key}?"
    key = key.replace("-", "_")
    paths = key_paths(app.compose_config("config", [], RunMode.RUN))
    if path := next((path for path in paths if path.endswith(f".{key}")), None):
        return f"{_WRITTEN}: {path}={value or 'VALUE'}"
    if close := get_close_matches(f"--{name.lstrip('-').replace('_', '-')}", known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    return f"{_WRITTEN}; --help shows some uses"


def existing_folder(where: str, folder: str | Path) -> Path:
    """The absolute path of a folder; raises SpecError where it does not exist."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise spec_error(
            where, f"there is no folder {path}", "give the folder that holds experiment/ or hooks/"
        )
    return path

"""The flags of a command line; for an unknown flag, the override that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra.types import RunMode

from hookrun.compose.check import nearest_key
from hookrun.compose.hydra import App, argument_parser, conf_dir, opened
from hookrun.compose.overrides import GROUPS, meant
from hookrun.config.root_keys import ROOT_KEYS
from hookrun.errors import Problem, SpecError, nearest

_WRITTEN = "settings are written key=value, without dashes"


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags and the overrides. Raises SpecError, and SystemExit after ``--version``."""
    parser = argument_parser()
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    if problems := [*_wrong_values(arguments, known), *_unknown(arguments, known)]:
        raise SpecError(problems)
    try:
        args, others = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SpecError(
            [Problem(error.argument_name or "", error.message, "--help shows some uses")]
        ) from None
    if others:
        raise SpecError([Problem(text, "is not a flag", _WRITTEN) for text in others])
    return args


def _flags(arguments: Sequence[str]) -> Iterator[tuple[int, str, str | None]]:
    """The position, the name and the value of each word that begins with a dash."""
    for position, word in enumerate(arguments):
        if word == "--":
            return
        if word.startswith("-") and word != "-":
            name, equals, value = word.partition("=")
            yield position, name, value if equals else None


def _wrong_values(arguments: Sequence[str], known: Mapping[str, argparse.Action]) -> Iterator[Problem]:
    for position, name, value in _flags(arguments):
        action = known.get(name)
        if action is None:
            continue
        takes = ", ".join(action.choices or ()) or ("a folder" if name in _FOLDERS else "a name")
        if action.nargs == 0 and value is not None:
            hint = f"put a space there: {name} {value}" if "=" in value else f"for one: {name} seed=1,2"
            yield Problem(name, f"takes no value, and was given {value!r}", hint if name in _SWEEP else "")
        elif action.nargs != 0:
            following = arguments[position + 1 : position + 2]
            given = (
                value if value is not None else next((each for each in following if each[:1] != "-"), None)
            )
            if given is None and action.nargs != "?":
                yield Problem(name, "needs a value", f"it takes {takes}")
            elif given is not None and action.choices and given not in action.choices:
                near = nearest(given, action.choices)
                hint = near if near.startswith("did you mean") else f"for one: {name} {takes.split(',')[0]}"
                yield Problem(name, f"found {given!r}, expected one of {takes}", hint)


_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp")
_SWEEP = ("--multirun", "-m")


def _unknown(arguments: Sequence[str], known: Mapping[str, argparse.Action]) -> Iterator[Problem]:
    unknown = [each for each in _flags(arguments) if each[1] not in known and not _is_short(each[1], known)]
    if not unknown:
        return
    with opened(conf_dir()) as app:
        for position, name, value in unknown:
            following = arguments[position + 1 : position + 2]
            if value is None and following and "=" not in following[0] and following[0][:1] != "-":
                value = following[0]
                yield Problem(f"{name} {value}", "is not a flag", _hint(name, value, known, app))
            else:
                yield Problem(arguments[position], "is not a flag", _hint(name, value, known, app))


def _is_short(word: str, known: Mapping[str, argparse.Action]) -> bool:
    """Whether the word is a short flag with its choice attached: ``-cjob``."""
    action = known.get(word[:2])
    return action is not None and word[2:] in (action.choices or ())


def _hint(name: str, value: str | None, known: Mapping[str, argparse.Action], app: App) -> str:
    key = name.lstrip("-")
    if key.partition(".")[0] in (*ROOT_KEYS, "experiment"):
        return f"{_WRITTEN}: {key}={value or ('NAME' if key in GROUPS else 'VALUE')}"
    if value is None and (override := meant(key, app)):
        return f"{_WRITTEN}: {override}"
    if f"--{key}" in known:
        return f"did you mean --{key}?"
    key = key.replace("-", "_")
    found = nearest_key(key, app.compose_config("config", [], RunMode.RUN))
    if found and found.rpartition(".")[2] == key:
        return f"{_WRITTEN}: {found}={value or 'VALUE'}"
    if close := get_close_matches(f"--{name.lstrip('-').replace('_', '-')}", known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    return f"{_WRITTEN}; --help shows some uses"


def existing_folder(where: str, folder: str | Path) -> Path:
    """The absolute path of a folder; raises SpecError where it does not exist."""
    path = Path(folder).absolute()
    if not path.is_dir():
        hint = "give the folder that holds experiment/ or hooks/"
        raise SpecError([Problem(where, f"there is no folder {path}", hint)])
    return path

"""The typed overrides: takes out the root keys that no file can set, and explains those that Hydra cannot parse."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException

from hookrun.command.compose.hydra import App, parse_override
from hookrun.engine.keys import ROOT_KEYS
from hookrun.errors import Fix, Problem, spec_error

RESUME = "resume"
ANYWAY = "resume_anyway"
LATEST = "latest"
PLAN = ("task=plan", "task.name=plan")
"""Words of the command, which show the plan of the experiment's own task."""
INTERPOLATION = r"`${` begins an interpolation; for the characters themselves write \${"
_KEY = re.compile(r"\+{0,2}[\w.@/-]+")
_QUOTED_KEY = re.compile(r"""(["'])([^"'{}\[\],:]+)\1(?=\s*:)""")
_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def take_trust(overrides: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    """The packages that the command line trusts, and the other overrides.

    Trust is only typed: it never becomes part of the configuration, which files could set. Raises SpecError.
    """
    typed, others = _parted("trust", overrides)
    trusted = set[str]()
    for text, value in typed:
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) and _PACKAGE.fullmatch(name) for name in names):
            raise spec_error(
                "trust", f"{text!r} is not a list of package names", "write +trust=[mypkg,other]"
            )
        trusted.update(map(str, names))
    return frozenset(trusted), others


def _parted(key: str, overrides: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Text and value of each override of a root key, with or without `+`; and the other overrides.

    The value of several values is None, and of what Hydra cannot read its text, such as a path with characters that
    are special to Hydra.
    """
    pattern = re.compile(rf"\+{{0,2}}{key}=(.*)", re.DOTALL)
    typed: list[tuple[str, Any]] = []
    others: list[str] = []
    for override in overrides:
        if (found := pattern.fullmatch(override)) is None:
            others.append(override)
            continue
        text = found[1]
        try:
            parsed = parse_override(f"{key}={text}")
            typed.append((text, None if parsed.is_sweep_override() else parsed.value()))
        except HydraException:
            typed.append((text, text))
    return typed, others


def unreadable(error: OverrideParseException, app: App) -> Problem:
    """The problem of an override that Hydra cannot parse."""
    text = error.override
    if "=" not in text and not text.startswith("~"):
        guess = meant(text, app)
        hint = f"did you mean {guess}?" if guess else "for example: experiment=clip_fc"
        return Problem(text, "is not of the form key=value", hint, found=text, fix=fix_of(guess))
    what = "Hydra cannot read this override"
    if "${" in text:
        return Problem(text, what, INTERPOLATION, place=text.partition("=")[0].lstrip("+"))
    next_step = "check that they are closed"
    whole = in_quotes(text)
    bare = _QUOTED_KEY.sub(r"\2", text)
    if of_one_value(bare) is not None:  # else it cannot be read for another reason
        whole = bare
        next_step = f"write keys without quotes: {_for_shell(bare)}"
    elif whole is not None:
        next_step = f"put the value in quotes of its own: {_for_shell(whole)}"
    hint = f"brackets, braces, commas, parentheses and quotes mean something to Hydra: {next_step}"
    key, _, value = text.partition("=")
    fix = fix_of(whole)
    if fix is not None and isinstance(fix.value, str) and _is_of_several(value):
        fix = None
    return Problem(text, what, hint, found=value, fix=fix, place=key.lstrip("+"))


def _is_of_several(value: str) -> bool:
    """Whether the value is meant to be a list or a mapping: it has brackets around it, or one that is not closed."""
    opening, closing = (len(re.findall(pattern, value)) for pattern in (r"[\[{]", r"[\]}]"))
    return value.startswith(("[", "{")) and (value.endswith(("]", "}")) or opening != closing)


def fix_of(override: str | None) -> Fix | None:
    """The key and the value of an override that is right; None without one, and for several values."""
    if override is None or (parsed := of_one_value(override)) is None:
        return None
    return Fix(override.partition("=")[0], parsed.value())


def of_one_value(text: str) -> Override | None:
    """The override that Hydra reads, if it sets a key to a single value; else None."""
    try:
        parsed = parse_override(text)
    except HydraException:
        return None
    return None if parsed.is_sweep_override() or parsed.is_delete() else parsed


def meant(word: str, app: App) -> str | None:
    """The override that a word without `=` was meant to be: ``clip_fc``, ``plan``, ``experiment:clip_fc``."""
    key, colon, value = word.partition(":")
    if colon and value and _is_key(key):
        return f"{key}={value}"
    for group in GROUPS:
        if word in app.options(group):
            return f"{group}={word}"
    return None


GROUPS = ("experiment", "task", "model", "data", "hooks", "train", "compute")


def _is_key(text: str) -> bool:
    root = text.lstrip("+").partition(".")[0].partition("@")[0]
    return _KEY.fullmatch(text) is not None and root in (*ROOT_KEYS, *GROUPS, "hydra")


def split_at_spaces(words: Sequence[str], app: App) -> Problem | None:
    """The problem of an override that spaces have split into several words: ``experiment = clip_fc``.

    The `where` of the problem is the words of the override; None if the first word is not part of a split override.
    """
    first, second, third = [*words, "", ""][:3]
    is_bare = bool(second) and "=" not in second and not second.startswith("~")
    count = 2
    whole = ""
    if "=" not in first and second == "=":
        if third:
            count = 3
            whole = f"{first}={third}"
    elif (second.startswith("=") and "=" not in first) or (is_bare and first.endswith("=") and first != "="):
        whole = first + second
    elif is_bare and _is_key(first):
        whole = f"{first}={second}"
    if whole:
        what = "an override is one word, key=value, without spaces"
        typed = " ".join(words[:count])
        return Problem(typed, what, f"write {whole}", found=typed, fix=fix_of(whole))
    if "=" not in first or _reads(first):
        return None
    for count in range(2, min(len(words), _MOST_WORDS) + 1):
        whole = " ".join(words[:count])
        if _reads(whole):
            what = "is one override, which the shell has split at its spaces"
            return Problem(whole, what, f"put it in quotes: {_for_shell(whole)}", fix=fix_of(whole))
    return None


_MOST_WORDS = 50


def several_values(override: Override) -> Problem:
    """The problem of an override with several values outside a sweep."""
    text = str(override.input_line)
    value = override.get_value_string()
    hint = "put -m first to run one job for each"
    if "(" not in value:
        hint += f"; a list is {text.partition('=')[0]}=[{value}]"
        if fixed := quoted(text):
            hint += f"; one text with commas is {fixed}"
    return Problem(override.key_or_group, f"{value!r} stands for several values", hint, found=value)


def quoted(text: str) -> str | None:
    """The override `in_quotes`, and the whole of it quoted for a shell."""
    whole = in_quotes(text)
    return None if whole is None else _for_shell(whole)


def in_quotes(text: str) -> str | None:
    """The override `text` with its value in quotes.

    In a mapping, ``{select: h[-1], hook: grad}``, only the values that need quotes get them. None where quotes do
    not help: the value has some already, holds an interpolation, or its brackets are not closed.
    """
    key, equals, value = text.partition("=")
    if not equals or not value or value[0] in "'\"" or "${" in value:
        return None
    if re.fullmatch(r"\{\s*\w+\s*:.*\}", value):
        members = re.split(r",\s*(?=\w+\s*:)", value[1:-1])
        whole = f"{key}={{{', '.join(map(_member, members))}}}"
        return whole if _reads(whole) else None
    whole = f"{key}={_in_quotes(value)}"
    return whole if _reads(whole, value) else None


def _member(text: str) -> str:
    """A member of a mapping, ``key: value``, with quotes around a value that Hydra cannot read as one value."""
    key, value = map(str.strip, text.split(":", 1))
    # of a mapping inside it is a part: quotes would change what it is
    is_nested = value.count("{") != value.count("}")
    return f"{key}: {value if is_nested or _reads(f'x={value}') else _in_quotes(value)}"


def _in_quotes(value: str) -> str:
    return QuotedString(value, Quote.single).with_quotes()


def _reads(override: str, value: str | None = None) -> bool:
    """Whether Hydra reads the override as a single value, equal to `value` if that is given."""
    parsed = of_one_value(override)
    return parsed is not None and (value is None or parsed.value() == value)


def _for_shell(override: str) -> str:
    # Double quotes read best, and a shell leaves all but these characters alone inside them.
    special = re.search(r"[\"`!]|\$[\w{(]|\\[\\$]", override)
    return shlex.quote(override) if special else f'"{override}"'


def take(key: str, overrides: Sequence[str], *, is_flag: bool = False) -> tuple[Any, list[str]]:
    """The typed value of the root key, with or without `+`, or None; and the other overrides.

    Raises SpecError where the key is given twice, or not with a single value, which of a flag is true or false.
    """
    typed, others = _parted(key, overrides)
    if not typed:
        return None, others
    if len(typed) > 1:
        raise spec_error(key, f"is given {len(typed)} times", "give it once")
    text, value = typed[0]
    if is_flag and not isinstance(value, bool):
        raise spec_error(key, f"found {text!r}, expected true or false", f"write {key}=true")
    if value is None or isinstance(value, dict | list):
        raise spec_error(key, f"found {text!r}, expected one value", "")
    return value, others


def named_folder(name: str, outputs: Path) -> Path:
    """The directory of the run or sweep that `resume` names; `latest` is a link in the folder of outputs.

    Raises SpecError without that link.
    """
    if name != LATEST:
        return Path(os.path.realpath(os.path.expanduser(name)))
    link = outputs / LATEST
    if not link.exists():
        raise spec_error(RESUME, f"there is no {link}", f"name the directory: {RESUME}={outputs.name}/…")
    return link.resolve()


@dataclass(frozen=True)
class Resume:
    """The typed `resume` and `resume_anyway`.

    name:   a directory, or `latest`
    force:  whether to resume even if the configuration, model, data or version has changed
    """

    name: str
    force: bool = False


def take_resume(overrides: Sequence[str]) -> tuple[Resume | None, list[str]]:
    """The typed `resume`, or None, and the other overrides. Raises SpecError."""
    name, others = take(RESUME, overrides)
    force, others = take(ANYWAY, others, is_flag=True)
    if name is None:
        if force:
            raise spec_error(ANYWAY, "goes with resume=DIR", "name the directory of the run")
        return None, others
    if isinstance(name, bool) or name == "":
        raise spec_error(RESUME, f"found {name!r}, expected a directory", "for example: resume=latest")
    return Resume(str(name), bool(force)), others

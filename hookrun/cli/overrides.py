"""What a person types: trust taken out of the overrides, and the quotes that an override needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from hookrun.cli.hydra_core import parse_override
from hookrun.errors import Problem, SpecError

_TRUST = re.compile(r"\+{0,2}trust=")
_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def take_trust(overrides: Iterable[str]) -> tuple[frozenset[str], list[str]]:
    """The packages that the person at the keyboard trusts, and the other overrides.

    Only what was typed counts, so it never becomes part of the configuration, which files could write to.
    Raises SpecError.
    """
    trusted: set[str] = set()
    others: list[str] = []
    for text in overrides:
        if not _TRUST.match(text):
            others.append(text)
            continue
        try:
            override = parse_override(text)
        except HydraException:
            raise _no_packages(text) from None
        trusted |= _packages(override, text)
    return frozenset(trusted), others


def _packages(override: Override, text: str) -> set[str]:
    value = None if override.is_sweep_override() else override.value()
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and _PACKAGE.fullmatch(name) for name in names):
        raise _no_packages(text)
    return set(names)


def _no_packages(text: str) -> SpecError:
    what = f"{text.partition('=')[2]!r} is not a list of package names"
    return SpecError([Problem("trust", what, "write +trust=[mypkg,other]")])


def quoted(text: str) -> str | None:
    """`text` with its value as one quoted string, or its mapping's values so; None where quotes would not help."""
    key, equals, value = text.partition("=")
    if not equals or not value or value[0] in "'\"" or "${" in value:
        return None
    if (inside := _FLOW_MAPPING.fullmatch(value)) is not None:
        return _shell(f"{key}={{{_FLOW_VALUE.sub(_quoted_member, inside[1])}}}")
    return _shell(f"{key}={QuotedString(value, Quote.single).with_quotes()}", value)


_FLOW_MAPPING = re.compile(r"\{(\s*\w+\s*:.*)\}")
_FLOW_VALUE = re.compile(r"(\w+\s*:\s*)((?:[^\s,'\"{}]|(?<=\S) (?=\S)|\{[^{}:]*\})+)(?=\s*,\s*\w+\s*:|\s*$)")
"""One member of a flow mapping, whose value is not quoted yet."""


def _quoted_member(member: re.Match[str]) -> str:
    key, value = member.groups()
    plain = re.fullmatch(r"[\w.*+-]*", value) or (value.startswith("[") and value.endswith("]"))
    return f"{key}{value if plain else QuotedString(value.strip(), Quote.single).with_quotes()}"


def _shell(override: str, value: object = None) -> str | None:
    """The override, quoted for a shell; None where Hydra does not take it, or takes it for another value."""
    try:
        parsed = parse_override(override).value()
    except HydraException:
        return None
    if value is not None and parsed != value:
        return None
    # Double quotes read best, and a shell leaves all but these characters alone inside them.
    special = re.search(r"[\"`!]|\$[\w{(]|\\[\\$]", override)
    return shlex.quote(override) if special else f'"{override}"'

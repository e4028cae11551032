"""Limits on the size of a spec, checked first, so that deep nesting or huge numbers cannot exhaust later checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hookrun.arguments import join
from hookrun.errors import Problem

MAX_DEPTH = 64
MAX_VALUES = 1_000_000
MAX_TEXT = 1 << 16
MAX_NAME = 256
MAX_INTEGER = 1 << 64


def beyond_limits(config: Any, where: str = "") -> Problem | None:
    """The first place where a plain spec is nested too deeply or is too large, or a number or text in it is.

    config: mappings and lists; other objects are not looked into
    """
    pending = [(config, where, 0)]
    count = 0
    while pending:
        value, path, depth = pending.pop()
        count += 1
        if count > MAX_VALUES:
            return Problem(path, f"the spec holds more than {MAX_VALUES:,} values", "keep tensors in a file")
        if depth > MAX_DEPTH:
            return Problem(path[:MAX_NAME], f"is nested more than {MAX_DEPTH} deep")
        if problem := _too_large(value, path):
            return problem
        members = list(_members(value))
        for name, _ in members:
            if isinstance(name, str) and len(name) > MAX_NAME:
                return Problem(path, f"found a name of {len(name):,} characters, expected at most {MAX_NAME}")
            if problem := _too_large(name, path):
                return problem
        pending += [(inner, join(path, str(name)), depth + 1) for name, inner in reversed(members)]
    return None


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _too_large(value: Any, path: str) -> Problem | None:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return Problem(path, f"found a text of {len(value):,} characters, expected at most {MAX_TEXT:,}")
    if isinstance(value, int) and not -MAX_INTEGER < value < MAX_INTEGER:
        return Problem(path, "found a whole number of more than 64 bits", "write it with an exponent: 1e30")
    return None

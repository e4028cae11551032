"""Checks of a whole configuration: its size and boolean keys before its sections, the order of problems after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hookrun.arguments import join, unknown_key
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


_ARGUMENTS = ("model.args", "data.args")
"""Keys whose values are arguments of a user's own function, which may have any keys."""


def without_boolean_keys(config: Mapping[Any, Any], where: str = "") -> tuple[dict[Any, Any], list[Problem]]:
    """The mapping without boolean keys, at any depth, and a problem for each; values are shared, not copied."""
    left, problems = dict[Any, Any](), list[Problem]()
    for key, value in config.items():
        path = join(where, str(key))
        if isinstance(key, bool):
            problems.append(unknown_key(where, key, ()))
        elif isinstance(value, Mapping) and where not in _ARGUMENTS:
            left[key], inner = without_boolean_keys(value, path)
            problems += inner
        else:
            left[key] = value
    return left, problems


def in_file_order(problems: Iterable[Problem], config: Mapping[Any, Any]) -> list[Problem]:
    """The problems, each once, in the order in which the configuration names their keys; others come last."""
    places = dict[int, dict[str, tuple[int, Any]]]()
    return sorted(dict.fromkeys(problems), key=lambda problem: _position(problem.where, config, places))


def _position(
    where: str, config: Mapping[Any, Any], places: dict[int, dict[str, tuple[int, Any]]]
) -> list[int]:
    """The position of each part of a key path among its siblings; a missing key comes after them.

    places: the siblings of each mapping by its `id`, filled here: each mapping is indexed once
    """
    position, node, parts = list[int](), config, where.split(".") if where else []
    while parts and isinstance(node, Mapping):
        if id(node) not in places:
            places[id(node)] = {str(key): (n, value) for n, (key, value) in enumerate(node.items())}
        siblings = places[id(node)]
        names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))  # a key may contain a dot
        name = next((name for name in names if name in siblings), None)
        if name is None:
            return [*position, len(siblings)]
        number, node = siblings[name]
        position.append(number)
        parts = parts[1 + name.count(".") :]
    return position

"""Keys that YAML reads as true or false: `on`, `off`, `yes`, `no` in any case, without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookrun.arguments import join, unknown_key
from hookrun.errors import Problem

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

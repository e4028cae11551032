"""The plan as a table: the modules and settings of each hook, how often it fired, and how much it changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hookrun.engine.spec.when import When
from hookrun.report.facts import MOST_HOOKS, Facts

SHOWN_MODULES = 4


def build(facts: Facts) -> list[dict[str, Any]] | None:
    """One row for each hook, in firing order.

    fired:   how often, over all its modules; None if the run kept no counts
    changed: the fraction of elements that its edits changed; None if that was not counted
    """
    rows = []
    for order, hook in enumerate(list(facts.planned.values())[:MOST_HOOKS]):
        shown = hook.targets[:SHOWN_MODULES]
        keys = ((hook.name, match.path) for match in hook.targets)
        sites = [facts.sites[key] for key in keys if key in facts.sites]
        total = sum(site.total for site in sites)
        given = {key: hook.clauses.get(key) for key in _CLAUSES} | (hook.params or {})
        settings = [f"{key}={_text(value)}" for key, value in given.items() if value is not None]
        rows.append(
            {
                "order": order,
                "name": hook.name,
                "modules": [match.path for match in shown],
                "more_modules": len(hook.targets) - len(shown),
                "classes": [match.type or "" for match in shown],
                "type": hook.hook or "",
                "action": hook.action or "",
                "settings": " ".join(settings),
                "when": _when(hook.when or {}),
                "shapes": [match.shape for match in shown],
                "fired": sum(site.fired for site in sites) if sites else None,
                "changed": sum(site.changed for site in sites) / total if total else None,
            }
        )
    return rows or None


_CLAUSES = ("target", "index", "tokens", "heads")
_LAST = ("index", "minus", "factor", "at")
"""Keys of a value that are shown after the run or the file."""


def _text(value: Any, around: Mapping[str, Any] | None = None) -> str:
    """The value of a parameter as YAML writes it.

    Keys of a mapping are left out if they are null, or the same in the mapping around it, or have no effect.
    """
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, Mapping):
        return str(value).lower() if isinstance(value, bool) else str(value)
    names = sorted(value, key=lambda key: key in _LAST)
    outer = around or {}
    given = {key: value[key] for key in names if value[key] is not None and outer.get(key) != value[key]}
    if given.get("factor") == 1:
        del given["factor"]
    if len(given) == 1 and (short := given.get("position", given.get("pick"))) is not None:
        return _text(short)  # tokens: -1, heads: [3, 5]
    return "{" + ", ".join(f"{key}: {_text(each, value)}" for key, each in given.items()) + "}"


def _when(stored: Mapping[str, Any]) -> str:
    """The schedule as the plan's table has it; empty if it always holds."""
    try:
        when = When.model_validate(stored)
    except ValidationError:  # of a later version, or a stranger's
        return str(stored)
    return "" if when.always else str(when)

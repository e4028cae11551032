"""The plan as a table: the modules and settings of each hook, how often it fired, and how much it changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hookrun.engine.spec.when import When
from hookrun.report.facts import MOST_HOOKS, RunData
from hookrun.store.records import PlannedHookRecord

SHOWN_MODULES = 4


def build(facts: RunData) -> list[dict[str, Any]] | None:
    """One row for each hook, in firing order.

    fired:   how often, over all its modules; None if the run kept no counts
    changed: the fraction of elements that its edits changed; None if that was not counted
    """
    rows: list[dict[str, Any]] = []
    for order, hook in enumerate(list(facts.planned.values())[:MOST_HOOKS]):
        shown = hook.targets[:SHOWN_MODULES]
        places = [(hook.name, match.path) for match in hook.targets]
        sites = [facts.sites[place] for place in places if place in facts.sites]
        total = sum(site.total for site in sites)
        changed = None
        if total:
            changed = sum(site.changed for site in sites) / total
        rows.append(
            {
                "order": order,
                "name": hook.name,
                "modules": [match.path for match in shown],
                "more_modules": len(hook.targets) - len(shown),
                "classes": [match.type or "" for match in shown],
                "type": hook.hook or "",
                "action": hook.action or "",
                "settings": _settings(hook),
                "when": _when(hook.when or {}),
                "shapes": [match.shape for match in shown],
                "fired": sum(site.fired for site in sites) if sites else None,
                "changed": changed,
            }
        )
    return rows or None


def _settings(hook: PlannedHookRecord) -> str:
    """``target=0 factor=0.5``: the clauses and parameters that are not null."""
    values = {key: hook.clauses.get(key) for key in _CLAUSES} | (hook.params or {})
    return " ".join(f"{key}={_text(value)}" for key, value in values.items() if value is not None)


_CLAUSES = ("target", "index", "tokens", "heads")
_LAST = ("index", "minus", "factor", "at")
"""Keys of a value that are shown after the run or the file."""


def _text(value: Any) -> str:
    """The value of a parameter as YAML writes it."""
    if isinstance(value, Mapping):
        return _mapping(value, {})
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _mapping(value: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    """A mapping in `outer`, without keys that are null, or the same in `outer`, or have no effect."""
    given: dict[str, Any] = {}
    for key in sorted(value, key=lambda key: key in _LAST):
        is_default = key == "factor" and value[key] == 1
        if value[key] is not None and outer.get(key) != value[key] and not is_default:
            given[key] = value[key]
    if len(given) == 1:
        for key in ("position", "pick"):
            if key in given:
                return _text(given[key])  # tokens: -1, heads: [3, 5]
    texts: list[str] = []
    for key, inner in given.items():
        text = _mapping(inner, value) if isinstance(inner, Mapping) else _text(inner)
        texts.append(f"{key}: {text}")
    return "{" + ", ".join(texts) + "}"


def _when(stored: Mapping[str, Any]) -> str:
    """The schedule as the plan's table has it; empty if it always holds."""
    try:
        when = When.model_validate(stored)
    except ValidationError:  # of a later version, or a stranger's
        return str(stored)
    return "" if when.always else str(when)

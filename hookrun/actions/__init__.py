"""The closed registry of actions: every module of this package that defines one. Imports no torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from hookrun.actions.base import Action

__all__ = ["Action", "actions"]


@cache
def actions() -> Mapping[str, type[Action]]:
    """Every action by name."""
    found: dict[str, type[Action]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for item in vars(module).values():
            own = isinstance(item, type) and issubclass(item, Action) and item.__module__ == module.__name__
            if own and "action_name" in vars(item):
                found[item.action_name] = item
    return MappingProxyType(dict(sorted(found.items())))

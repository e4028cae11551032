"""The closed registry of actions: every module of this package that defines one. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache

from hookrun.engine.actions.base import Action
from hookrun.engine.discovery import Registry

__all__ = ["Action", "actions"]


@cache
def actions() -> Mapping[str, type[Action]]:
    """Every action by name."""
    return Registry(sys.modules[__name__], Action, "action_name")  # type: ignore[type-abstract]

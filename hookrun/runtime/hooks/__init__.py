"""Registers each hook type with PyTorch: one class for each, found by its `hook_types`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from hookrun.discovery import own_subclasses
from hookrun.hook_types import HookType
from hookrun.runtime.hooks.base import RegisteredHook


@cache
def registered_hooks() -> Mapping[HookType, type[RegisteredHook]]:
    """Hook type -> the class that registers it, from all classes of this package that have `hook_types`."""
    registered = dict[HookType, type[RegisteredHook]]()
    for item in own_subclasses(sys.modules[__name__], RegisteredHook):
        registered |= dict.fromkeys(vars(item).get("hook_types", ()), item)
    return MappingProxyType(registered)

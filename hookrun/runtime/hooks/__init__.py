"""How each hook type is registered with PyTorch: one class for each, found by its `hook_types`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from hookrun.hook_types import HookType
from hookrun.runtime.hooks.base import RegisteredHook


@cache
def registered_hooks() -> Mapping[HookType, type[RegisteredHook]]:
    """Hook type -> the class that is registered for it: every class of this package that names hook types."""
    found = dict[HookType, type[RegisteredHook]]()
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for item in vars(module).values():
            own = (
                isinstance(item, type)
                and issubclass(item, RegisteredHook)
                and item.__module__ == module.__name__
            )
            if own:
                found |= dict.fromkeys(vars(item).get("hook_types", ()), item)
    return MappingProxyType(found)

"""Closed registries: what the modules of a package define, found by importing each of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import TypeVar

T = TypeVar("T")


def discovered(package: ModuleType, base: type[T], name: str) -> Mapping[str, type[T]]:
    """The subclasses of `base` that name themselves, by that name, in alphabetical order.

    package: its direct modules are imported; classes that they only import from elsewhere do not count
    name:    the attribute with the name; a class that inherits it without one of its own is not in the registry
    """
    found: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for item in vars(module).values():
            own = isinstance(item, type) and issubclass(item, base) and item.__module__ == module.__name__
            if own and name in vars(item):
                found[getattr(item, name)] = item
    return MappingProxyType(dict(sorted(found.items())))

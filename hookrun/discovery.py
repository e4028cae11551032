"""Finds the classes of a closed registry by importing each module of a package, or their names alone."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def own_subclasses(package: ModuleType, base: type[T], only: str | None = None) -> Iterator[type[T]]:
    """The subclasses of `base` that the direct modules of a package define, not those that they import.

    only: the name of the one module to import; None: all of them
    """
    for info in pkgutil.iter_modules(package.__path__):
        if only is None or info.name == only:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for item in vars(module).values():
                if isinstance(item, type) and issubclass(item, base) and item.__module__ == module.__name__:
                    yield item


@dataclass(frozen=True, eq=False)
class Registry(Mapping[str, type[T]]):
    """Name -> subclass of `base`, in alphabetical order; a module is imported when its name is asked for.

    name: the class attribute with the name; a class that only inherits it is not in the registry
    """

    package: ModuleType
    base: type[T]
    name: str
    _known: dict[str, type[T]] = field(default_factory=dict, init=False)

    def __getitem__(self, key: str) -> type[T]:
        for only in (key, None):  # first the module of its name
            if key not in self._known:
                own = own_subclasses(self.package, self.base, only)
                self._known.update((vars(item)[self.name], item) for item in own if self.name in vars(item))
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        items = map(vars, own_subclasses(self.package, self.base))
        return iter(sorted({item[self.name] for item in items if self.name in item}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def names_in(package: str, name: str) -> list[str]:
    """The names of a Registry, read off the source text of the modules: none of them is imported.

    package: its qualified name
    name:    the attribute with the name, which a class sets to a text

    Empty where the modules have been installed without their source.
    """
    spec = importlib.util.find_spec(package)
    found = set[str]()
    for info in pkgutil.iter_modules(None if spec is None else spec.submodule_search_locations):
        module = info.module_finder.find_spec(info.name, None)
        source = getattr(None if module is None else module.loader, "get_source", lambda _: None)(info.name)
        found.update(re.findall(rf'^ +{name} = "(\w+)"$', source or "", re.MULTILINE))
    return sorted(found)

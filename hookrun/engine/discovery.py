"""Finds the classes of a registry: in the modules of a package, and in those that installed packages name.

An installed package adds actions, hook types, selector forms, tasks, loggers and sections of the page by modules that
it names under the entry-point group `hookrun.extensions`; see `hookrun.extend`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import TypeVar

from hookrun.errors import HookrunError, reason

T = TypeVar("T")

EXTENSIONS = "hookrun.extensions"
"""The entry-point group of modules that add to hookrun."""


@cache
def extension_modules() -> tuple[ModuleType, ...]:
    """The modules that installed packages name under `hookrun.extensions`, imported, in the order of their names.

    Raises HookrunError for a module that cannot be imported.
    """
    modules = list[ModuleType]()
    for point in sorted(entry_points(group=EXTENSIONS), key=lambda point: (point.name, point.value)):
        try:
            modules.append(importlib.import_module(point.value))
        except Exception as error:
            package = "an installed package" if point.dist is None else point.dist.name
            raise HookrunError(
                f"{package} extends hookrun by {point.name} = {point.value!r}, which cannot be imported: "
                f"{reason(error)}; mend it, or uninstall {package}"
            ) from error
    return tuple(modules)


def own_subclasses(package: ModuleType, base: type[T], only: str | None = None) -> Iterator[type[T]]:
    """The subclasses of `base` that the direct modules of a package and extensions define, not those that they import.

    only: the name of the one module of the package to import; None: all of them, then the extensions
    """
    for info in pkgutil.iter_modules(package.__path__):
        if only is None or info.name == only:
            yield from _defined_in(importlib.import_module(f"{package.__name__}.{info.name}"), base)
    if only is None:
        for module in extension_modules():
            yield from _defined_in(module, base)


def _defined_in(module: ModuleType, base: type[T]) -> Iterator[type[T]]:
    for item in vars(module).values():
        if isinstance(item, type) and issubclass(item, base) and item.__module__ == module.__name__:
            yield item


def modules_named(package: str, name: str, only: str | None = None) -> Iterator[ModuleType]:
    """The module `name` of each folder of a package that has one, such as the `task` of each study, in their order.

    package: its qualified name
    only:    the name of the one folder to look into; None: all of them
    """
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.ispkg and (only is None or info.name == only):
            inside = f"{package}.{info.name}.{name}"
            if importlib.util.find_spec(inside) is not None:
                yield importlib.import_module(inside)


@dataclass(frozen=True, eq=False)
class Registry(Mapping[str, type[T]]):
    """Name -> subclass of `base`, in alphabetical order; a module is imported when its name is asked for.

    name:    the class attribute with the name; a class that only inherits it is not in the registry
    folders: qualified name of a package whose folders may each have a module `part` with classes of their own
    """

    package: ModuleType
    base: type[T]
    name: str
    folders: str | None = None
    part: str = ""
    _known: dict[str, type[T]] = field(default_factory=dict, init=False)

    def _classes(self, only: str | None = None) -> Iterator[type[T]]:
        yield from own_subclasses(self.package, self.base, only)
        if self.folders is not None:
            for module in modules_named(self.folders, self.part, only):
                yield from _defined_in(module, self.base)

    def __getitem__(self, key: str) -> type[T]:
        for only in (key, None):  # first the module of its name
            if key not in self._known:
                for item in self._classes(only):
                    if self.name in vars(item):
                        self._known.setdefault(vars(item)[self.name], item)
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        """The names. Raises HookrunError if an extension has a name that is taken."""
        classes = dict[str, type[T]]()
        for item in self._classes():
            name = vars(item).get(self.name)
            if name is not None and classes.setdefault(name, item) is not item:
                raise HookrunError(
                    f"{item.__module__}.{item.__qualname__} has the name {name!r}, which "
                    f"{classes[name].__module__}.{classes[name].__qualname__} has already: give it another one"
                )
        return iter(sorted(classes))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def names_in(package: str, name: str) -> list[str]:
    """The names of a Registry, read off the source text of the modules: none of them is imported.

    package: its qualified name
    name:    the attribute with the name, which a class sets to a text

    Empty where the modules have been installed without their source.
    """
    spec = importlib.util.find_spec(package)
    names = set[str]()
    for info in pkgutil.iter_modules(None if spec is None else spec.submodule_search_locations):
        module = info.module_finder.find_spec(info.name, None)
        source = getattr(None if module is None else module.loader, "get_source", lambda _: None)(info.name)
        names.update(re.findall(rf'^ +{name} = "(\w+)"$', source or "", re.MULTILINE))
    return sorted(names)

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
from functools import cache, cached_property
from importlib.metadata import entry_points
from types import ModuleType
from typing import TypeVar

from hookrun.errors import SpecError, reason, spec_error

T = TypeVar("T")

EXTENSIONS = "hookrun.extensions"
"""The entry-point group of modules that add to hookrun."""


@cache
def extension_modules() -> tuple[ModuleType, ...]:
    """The modules that installed packages name under `hookrun.extensions`, imported, in the order of their names.

    No module of hookrun may call this while it is imported: an extension imports it too. Raises SpecError for a module
    that cannot be imported.
    """
    modules: dict[ModuleType, None] = {}  # a module may be named twice
    for point in sorted(entry_points(group=EXTENSIONS), key=lambda point: (point.name, point.value)):
        try:
            modules[importlib.import_module(point.value)] = None
        except (Exception, SystemExit) as error:
            package = "an installed package" if point.dist is None else point.dist.name
            raise spec_error(
                package,
                f"extends hookrun by {point.name} = {point.value!r}, which cannot be imported: {reason(error)}",
                f"mend it, or uninstall {package}",
            ) from error
    return tuple(modules)


def taken(item: type | str, name: str, owner: type | str) -> SpecError:
    """The error of something in an extension, `item`, whose name belongs to `owner`."""
    return spec_error(
        _qualified(item),
        f"has the name {name!r}, which {_qualified(owner)} has already",
        "give it another one",
    )


def _qualified(item: type | str) -> str:
    return item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}"


def own_subclasses(package: ModuleType, base: type[T]) -> Iterator[type[T]]:
    """The subclasses of `base` that modules of a package and of extensions define, not those that they import."""
    yield from _in_modules(package, base)
    yield from _in_extensions(base)


def _in_modules(package: ModuleType, base: type[T], only: str | None = None) -> Iterator[type[T]]:
    for info in pkgutil.iter_modules(package.__path__):
        if only is None or info.name == only:
            yield from _defined_in(importlib.import_module(f"{package.__name__}.{info.name}"), base)


def _in_extensions(base: type[T]) -> Iterator[type[T]]:
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

    Every look-up raises SpecError if an extension has a name that is taken.

    name:    the class attribute with the name; a class that only inherits it is not in the registry
    folders: qualified name of a package whose folders may each have a module `part` with classes of their own
    """

    package: ModuleType
    base: type[T]
    name: str
    folders: str | None = None
    part: str = ""
    _known: dict[str, type[T]] = field(default_factory=dict, init=False)

    def _shipped(self, only: str | None = None) -> Iterator[type[T]]:
        yield from _in_modules(self.package, self.base, only)
        if self.folders is not None:
            for module in modules_named(self.folders, self.part, only):
                yield from _defined_in(module, self.base)

    @cached_property
    def _extensions(self) -> dict[str, type[T]]:
        extensions: dict[str, type[T]] = {}
        for item in _in_extensions(self.base):
            name = vars(item).get(self.name)
            if name is not None:
                owner = self._find(name) or extensions.setdefault(name, item)
                if owner is not item:
                    raise taken(item, name, owner)
        return extensions

    def _find(self, key: str) -> type[T] | None:
        for only in (key, None):  # first the module of its name
            if key not in self._known:
                for item in self._shipped(only):
                    if self.name in vars(item):
                        self._known.setdefault(vars(item)[self.name], item)
        return self._known.get(key)

    def __getitem__(self, key: str) -> type[T]:
        item = self._extensions.get(key) or self._find(key)
        if item is None:
            raise KeyError(key)
        return item

    def __iter__(self) -> Iterator[str]:
        names = {vars(item)[self.name] for item in self._shipped() if self.name in vars(item)}
        return iter(sorted(names | self._extensions.keys()))

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

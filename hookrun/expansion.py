"""The size of a configuration with its interpolations expanded, computed from the text before any is resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_RESOLVED = 1_000
"""Interpolations resolved for one configuration."""
MAX_VALUES = 10_000
"""Values of a configuration with its interpolations expanded."""
MAX_CHARACTERS = 1 << 20
"""Characters of its texts, likewise."""

_NAMES = re.compile(r"\$\{\s*(?:oc\.(?:select|decode|create|dict\.\w+)\s*:\s*['\"]?)?([\w.\[\]$-]+)")
_STEP = re.compile(r"[^.\[\]]+")
_MAX_CHAIN = 32

Path = tuple[str, ...]


class TooLarge(ValueError):
    """The expanded interpolations exceed the limits of a configuration."""


@dataclass(frozen=True, slots=True)
class Size:
    """Interpolations to resolve, values and characters of a part of a configuration."""

    resolved: int = 0
    values: int = 0
    characters: int = 0

    def __add__(self, other: Size) -> Size:
        total = Size(
            self.resolved + other.resolved, self.values + other.values, self.characters + other.characters
        )
        if total.resolved > MAX_RESOLVED:
            raise TooLarge(f"the configuration resolves more than {MAX_RESOLVED:,} interpolations")
        if total.values > MAX_VALUES or total.characters > MAX_CHARACTERS:
            what = f"more than {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters"
            raise TooLarge(f"the interpolations of the configuration stand for {what}")
        return total


def expanded(config: Any) -> Size:
    """The size of a plain, unresolved configuration with each interpolation expanded. Raises TooLarge.

    Names that contain interpolations, ``${a.${b}}``, are known only when they are resolved and count little here, so
    resolving them has to be limited as well.
    """
    return _Expansion(config, {}).size((), config, 0) if _has_any(config) else Size()


def _has_any(config: Any) -> bool:
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and "${" in value:
            return True
        pending += [inner for _, inner in _members(value)]
    return False


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list):
        yield from ((str(number), inner) for number, inner in enumerate(value))


@dataclass
class _Expansion:
    root: Any
    known: dict[Path, Size | None]

    def size(self, path: Path, value: Any, chain: int) -> Size:
        """The size of the value at `path`, which is reached over `chain` interpolations that lead to one another."""
        if path in self.known:
            return self.known[path] or Size(1)  # None: it leads to itself, which OmegaConf refuses
        if chain > _MAX_CHAIN:
            raise TooLarge(f"more than {_MAX_CHAIN} interpolations lead to one another")
        self.known[path] = None
        total = Size(values=1)
        if isinstance(value, str):
            total += Size(value.count("${"), 0, len(value))
            for target in self._targets(path, value):
                total += self.size(target, self._at(target), chain + 1)
        for name, inner in _members(value):
            total += self.size((*path, name), inner, chain)
        self.known[path] = total
        return total

    def _targets(self, path: Path, text: str) -> Iterator[Path]:
        """The paths of the values that a text names, relative names from the mapping that contains it."""
        for found in _NAMES.finditer(text) if "${" in text else ():
            name = found[1]
            dots = len(name) - len(name.lstrip("."))
            above = path[: len(path) - dots] if dots else ()
            yield (*above, *_STEP.findall(name))

    def _at(self, path: Path) -> Any:
        value = self.root
        for step in path:
            value = dict(_members(value)).get(step)
        return value

"""A mapping whose keys may have other names, and which explains the keys that it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from hookrun.errors import HookrunError, nearest

V = TypeVar("V")


class NoSuchKey(HookrunError, KeyError):
    """Nothing is there under this name; the message says which names are near."""

    __str__ = Exception.__str__  # KeyError's would show the message in quotes, with its line breaks escaped


class Lookup(Mapping[str, V]):
    """A mapping by name whose missing keys are explained.

    kind:    what a key is: hook, module or tensor
    where:   what the mapping is about
    aliases: other name -> the key that it stands for
    """

    def __init__(
        self, kind: str, where: str, items: Mapping[str, V], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._kind = kind
        self._where = where
        self._items = items
        self._aliases = aliases or {}

    def __getitem__(self, key: str) -> V:
        if not isinstance(key, str):  # rows are asked for where a name comes first
            raise NoSuchKey(f"{self._where} holds one {self._kind} per name; {nearest('', self._items)}")
        found = key if key in self._items else self._aliases.get(key, key)
        if found not in self._items:
            raise NoSuchKey(f"no {self._kind} {key!r} in {self._where}: {nearest(key, self._items)}")
        return self._items[found]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{self._where}: {', '.join(map(repr, self._items))}>"

"""A mapping whose keys may have aliases, and whose errors for missing keys name similar ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from hookrun.errors import HookrunError, nearest

V = TypeVar("V")


class NoSuchKey(HookrunError, KeyError):
    """There is no such key; the message names similar keys."""

    __str__ = Exception.__str__  # that of KeyError shows the repr of the message


class Lookup(Mapping[str, V]):
    """A mapping by name whose errors for missing keys name similar ones.

    kind:    what a key is: hook, module or tensor
    where:   what the mapping contains, for messages
    aliases: other name -> key
    """

    def __init__(
        self, kind: str, where: str, items: Mapping[str, V], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._kind = kind
        self._where = where
        self._items = items
        self._aliases = aliases or {}

    def __getitem__(self, key: str) -> V:
        if not isinstance(key, str):  # a frequent mistake: indexing rows before naming the hook or module
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

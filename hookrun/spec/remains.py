"""The valid parts of a configuration with mistakes, so that those can be checked in the same pass."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hookrun.arguments import problems_of
from hookrun.errors import Problem

M = TypeVar("M", bound=BaseModel)


def validated(
    model: type[M], given: Mapping[str, Any], where: str, stand_ins: Mapping[str, Any] | None = None
) -> tuple[M | None, list[Problem]]:
    """The section from its valid keys, and every mistake in it.

    Invalid keys are replaced by their defaults. None if an invalid key has neither a default nor a stand-in.

    where:     the key path of the section
    stand_ins: values for invalid keys that have no default
    """
    left, problems = copy.deepcopy(dict(given)), list[Problem]()
    while True:
        try:
            return model.model_validate(left), problems
        except ValidationError as error:
            problems = problems or problems_of(error, where, model)
            locations = [detail["loc"] for detail in error.errors(include_url=False)]
        found = [each for each in (_held(left, location) for location in locations) if each is not None]
        for holder, key in found:
            holder.pop(key, None)  # a value may have several mistakes
        new = {key: value for key, value in (stand_ins or {}).items() if key not in left}
        left |= new
        if not found and not new:
            return None, problems


def _held(section: dict[str, Any], location: Iterable[int | str]) -> tuple[dict[str, Any], Any] | None:
    """The innermost mapping that contains the wrong value, and its key there; None if there is none."""
    holder: dict[str, Any] | None = None
    node: Any = section
    wrong: Any = None
    for part in location:
        if not isinstance(node, dict) or part not in node:
            break
        holder, wrong, node = node, part, node[part]
    return None if holder is None else (holder, wrong)


def beyond(found: Iterable[Problem], known: Iterable[Problem]) -> list[Problem]:
    """The problems of `found` that are not consequences of known ones, which are at the same key path or above it.

    A problem of a whole hook says nothing about its selector.
    """
    places = {each.where for each in known if each.where}
    return [each for each in found if places.isdisjoint(_above(each.where))]


def _above(where: str) -> Iterator[str]:
    """The key path itself, and the key paths above it whose problems explain a problem here."""
    yield where
    if not where.startswith("hooks."):
        parts = where.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def in_file_order(problems: Iterable[Problem], config: Mapping[Any, Any]) -> list[Problem]:
    """The problems, each once, in the order in which the configuration names their keys; others come last."""
    index = _Index()
    return sorted(dict.fromkeys(problems), key=lambda each: index.position(each.where, config))


class _Index:
    """The positions of keys among their siblings; each mapping is indexed once."""

    def __init__(self) -> None:
        self._of = dict[int, dict[str, tuple[int, Any]]]()

    def position(self, where: str, config: Mapping[Any, Any]) -> list[int]:
        """The position of each part of a key path; a missing key comes after its siblings."""
        place, node, parts = list[int](), config, where.split(".") if where else []
        while parts and isinstance(node, Mapping):
            siblings = self._siblings(node)
            names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))  # a key may contain a dot
            name = next((each for each in names if each in siblings), None)
            if name is None:
                return [*place, len(siblings)]
            number, node = siblings[name]
            place.append(number)
            parts = parts[1 + name.count(".") :]
        return place

    def _siblings(self, node: Mapping[Any, Any]) -> dict[str, tuple[int, Any]]:
        if id(node) not in self._of:
            self._of[id(node)] = {str(key): (n, value) for n, (key, value) in enumerate(node.items())}
        return self._of[id(node)]

"""What is left of a configuration without its mistakes, so that the rest of it can be checked in the same go."""

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
    """The section as far as it is right, and every mistake in it.

    Wrong keys are left out, so that their defaults stand in; None where nothing can stand in for one.

    where:     the key path of the section
    stand_ins: what stands in for keys that have no default
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
    """The innermost mapping that holds the wrong value, and its key there; None where nothing of it is there."""
    holder: dict[str, Any] | None = None
    node: Any = section
    wrong: Any = None
    for part in location:
        if not isinstance(node, dict) or part not in node:
            break
        holder, wrong, node = node, part, node[part]
    return None if holder is None else (holder, wrong)


def beyond(found: Iterable[Problem], known: Iterable[Problem]) -> list[Problem]:
    """The problems of `found` that do not follow from those that are known, at the same place or above it.

    What is wrong with a whole hook says nothing about its selector.
    """
    places = {each.where for each in known if each.where}
    return [each for each in found if places.isdisjoint(_above(each.where))]


def _above(where: str) -> Iterator[str]:
    """The place itself, and those above it about which it says nothing new."""
    yield where
    if not where.startswith("hooks."):
        parts = where.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def in_file_order(problems: Iterable[Problem], config: Mapping[Any, Any]) -> list[Problem]:
    """The problems, each once, in the order in which the configuration names their keys; others come last."""
    index = _Index()
    return sorted(dict.fromkeys(problems), key=lambda each: index.position(each.where, config))


class _Index:
    """The places of keys among their siblings, each mapping counted once."""

    def __init__(self) -> None:
        self._of = dict[int, dict[str, tuple[int, Any]]]()

    def position(self, where: str, config: Mapping[Any, Any]) -> list[int]:
        """The place of each part of a key path; what is not there comes after its siblings."""
        place, node, parts = list[int](), config, where.split(".") if where else []
        while parts and isinstance(node, Mapping):
            siblings = self._siblings(node)
            names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))  # a key may hold a dot
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

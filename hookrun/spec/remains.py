"""What is left of a configuration without its mistakes, so that the rest of it can be checked in the same go."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
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
        removed = [_removed(left, location) for location in locations]
        new = {key: value for key, value in (stand_ins or {}).items() if key not in left}
        left |= new
        if not any(removed) and not new:
            return None, problems


def _removed(section: dict[str, Any], location: Iterable[int | str]) -> bool:
    """Take the wrong value out of the innermost mapping that holds it; False where nothing of it is there."""
    holder: dict[str, Any] | None = None
    node: Any = section
    wrong: Any = None
    for part in location:
        if not isinstance(node, dict) or part not in node:
            break
        holder, wrong, node = node, part, node[part]
    if holder is None:
        return False
    del holder[wrong]
    return True


def beyond(found: Iterable[Problem], known: Iterable[Problem]) -> list[Problem]:
    """The problems of `found` that do not follow from those that are known, at the same place or above it.

    What is wrong with a whole hook says nothing about its selector.
    """
    places = {each.where for each in known if each.where}
    above = tuple(f"{place}." for place in places if not place.startswith("hooks."))
    return [each for each in found if each.where not in places and not each.where.startswith(above)]


def in_file_order(problems: Iterable[Problem], config: Mapping[Any, Any]) -> list[Problem]:
    """The problems, each once, in the order in which the configuration names their keys; others come last."""
    return sorted(dict.fromkeys(problems), key=lambda each: _position(each.where, config))


def _position(where: str, config: Mapping[Any, Any]) -> list[int]:
    """The place of each part of a key path among its siblings."""
    place, node, rest = list[int](), config, where
    while rest and isinstance(node, Mapping):
        keys = [str(key) for key in node]
        key = next((each for each in keys if rest == each or rest.startswith(f"{each}.")), None)
        if key is None:
            return [*place, len(keys)]
        place.append(keys.index(key))
        node, rest = list(node.values())[place[-1]], rest.removeprefix(key).removeprefix(".")
    return place

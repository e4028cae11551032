"""Which values of a configuration came from an interpolation, so that an error can say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hookrun.errors import Problem, Refusal

MOST_SHOWN = 100
"""Characters of an interpolation that are shown."""


@contextmanager
def origins_told(cfg: DictConfig) -> Iterator[None]:
    """Add to each problem raised in the block the interpolation of `cfg` from which the wrong value came."""
    try:
        yield
    except Refusal as error:
        written: Any = OmegaConf.to_container(cfg, resolve=False)
        origins = dict(_interpolations(written, ""))
        if not origins:
            raise
        raise type(error)([_told(each, origins) for each in error.errors], error.notes) from error


def _interpolations(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """The key path and the text of every value that holds an interpolation."""
    if isinstance(node, str) and "${" in node:
        yield path, node if len(node) <= MOST_SHOWN else f"{node[:MOST_SHOWN]}…"
    members = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in members:
        yield from _interpolations(value, f"{path}.{key}" if path else str(key))


def _told(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem with the interpolation at its key path added, or at the nearest key path above it."""
    place = problem.where
    while place and place not in origins:
        place = place.rpartition(".")[0]
    if not place:
        return problem
    if place != problem.where:
        return replace(problem, what=f"{problem.what} ({place} is {origins[place]})")
    found, colon, expected = problem.what.partition(": ")
    if colon and found.startswith("found "):
        return replace(problem, what=f"{found} (from {origins[place]}): {expected}")
    found, comma, expected = problem.what.partition(", ")
    if comma and found.startswith("found "):
        return replace(problem, what=f"{found} (from {origins[place]}), {expected}")
    return replace(problem, what=f"{problem.what} (from {origins[place]})")

"""From text to a checked mapping. This file imports nothing of hookrun: the command line explains keys by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HOOKS_FROM = "hooks_from"
"""The key with the folder of a bundle."""

ROOT_KEYS = (
    "task",
    "model",
    "data",
    "train",
    "compute",
    "hooked",
    "seed",
    "strict",
    "objective",
    "baseline",
    "vars",
    "needs",
    "tags",
    "note",
    HOOKS_FROM,
    "hooks",
)
"""The keys at the root of an experiment: the sections of `hookrun.run.experiment.settings.Settings`, and `hooks`."""

GIVEN = "given"
"""The `name` in `model` or `data` of what a caller from Python gave in its place."""

MAX_DEPTH = 64
MAX_TEXT = 1 << 16
MAX_NAME = 256
"""Limits of every spec, from a file or from Python: nesting, and characters of a text and of a name."""


def key_of(override: str) -> str:
    """The key of an override of the command line, or the key itself: ``hooks.a.max`` of ``+hooks.a.max=1``."""
    return override.lstrip("+~").partition("=")[0]


def root_of(override: str) -> str:
    """The first part of the key of an override: ``model`` of ``model=cnn`` and of ``model.args.width=2``."""
    return key_of(override).partition(".")[0].partition("/")[0].partition("@")[0]


def nested(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """The key path and the value of every member of plain mappings and lists, at any depth."""
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in members:
        place = f"{path}.{key}" if path else str(key)
        yield place, value
        yield from nested(value, place)

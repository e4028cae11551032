"""Ids of parametrized tests that say what the test is about, so that `pytest -k WORD` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 60
"""Characters of an id; the rest is cut off, and pytest numbers ids that are then equal."""

DEEPEST = 4
"""Levels of lists and mappings that an id shows."""


def readable_id(value: Any) -> str | None:
    """The id of a parameter, or None where pytest's own is as good: for short texts, numbers and functions.

    It is the same in every process, as xdist needs: sets and objects, whose text is not, are left to pytest.
    """
    if isinstance(value, str) and len(value) <= LONGEST:
        return None
    if isinstance(value, bool | float | complex | type) or value is None:
        return None
    text = _text(value, DEEPEST)
    if not text:
        return None
    return text[:LONGEST]


def _text(value: Any, levels: int) -> str | None:
    """The value as a short text, or None if one of its parts has no text of its own."""
    if isinstance(value, int) and abs(value) > 10**LONGEST:
        return "a large number"
    if value is None or isinstance(value, bool | int | float | complex | slice):
        return str(value)
    if isinstance(value, str):
        return repr(value[:LONGEST])[1:-1]
    if isinstance(value, bytes):
        return repr(value[:LONGEST])[2:-1]
    if isinstance(value, Path):
        return value.name if value.is_absolute() else value.as_posix()
    if isinstance(value, type):
        return value.__name__
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if not isinstance(value, Mapping | tuple | list):
        return None
    if levels == 0:
        return "..."
    texts = []
    for part in value:
        text = _text(part, levels - 1)
        if text is not None and isinstance(value, Mapping):
            of_value = _text(value[part], levels - 1)
            text = None if of_value is None else f"{text}:{of_value}"
        if text is None:
            return None
        texts.append(text)
    return ",".join(texts)

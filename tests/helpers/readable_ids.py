"""Ids of parametrized tests that say what the test is about, so that `pytest -k WORD` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 60
"""Characters of an id; the rest is cut off, and pytest numbers ids that are then equal."""


def readable_id(value: Any) -> str | None:
    """The id of a parameter, or None where pytest's own is as good: for short texts, numbers and functions.

    It is the same in every process, as xdist needs: sets and objects, whose text is not, are left to pytest.
    """
    if isinstance(value, str) and len(value) <= LONGEST:
        return None
    if isinstance(value, bool | int | float | complex | type) or value is None:
        return None
    text = _text(value)
    if not text:
        return None
    return text[:LONGEST]


def _text(value: Any) -> str | None:
    """The value as a short text, or None if one of its parts has no text of its own."""
    if value is None or isinstance(value, bool | int | float | complex | slice):
        return str(value)
    if isinstance(value, str | bytes):
        return repr(value)[1:-1]
    if isinstance(value, Path):
        return value.name if value.is_absolute() else value.as_posix()
    if isinstance(value, Mapping):
        return _joined([_pair(key, part) for key, part in value.items()])
    if isinstance(value, tuple | list):
        return _joined([_text(part) for part in value])
    if isinstance(value, type):
        return value.__name__
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return None


def _pair(key: Any, value: Any) -> str | None:
    text = _text(value)
    if text is None:
        return None
    return f"{key}:{text}"


def _joined(parts: list[str | None]) -> str | None:
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        return None
    return ",".join(texts)

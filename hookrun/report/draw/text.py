"""Texts for numbers, times and names; names may contain any characters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from hookrun.errors import printable


def token_name(text: str, token: int, most: int = 40) -> str:
    """The text of a token as a name: a space before it is shown, and a token without a text is its number."""
    if not text:
        return f"#{token}" if token >= 0 else "?"
    bare = text.lstrip(" ")
    name = "␣" * min(len(text) - len(bare), 4) + printable(bare[: most + 1])
    if len(name) > most:
        name = f"{name[: most - 1]}…"
    return name


def fitted(names: Sequence[str], most: int = 28) -> tuple[str, list[str]]:
    """The path that all names begin with, such as ``transformer.``, and the names without it.

    Names of more than `most` characters lose their left end; if the difference is there, what they share at the right.
    """
    start = ""
    if len(set(names)) > 1:
        start = "".join(names[0][: common(names)].rpartition(".")[:2])
    if not any(map(str.isalpha, start)) or "=" in start:
        start = ""  # the beginning of numbers, or of settings such as lr=0.1
    tails = [printable(name.removeprefix(start)) for name in names]
    end = common([name[::-1] for name in tails])
    beginnings = [f"{name[: len(name) - end]}…" for name in tails]
    for candidates in (tails, beginnings):
        short = [name if len(name) <= most else f"…{name[1 - most :]}" for name in candidates]
        if len(set(short)) == len(set(names)):
            return printable(start), short
    return printable(start), tails


def common(sequences: Sequence[Sequence[object]]) -> int:
    """How many items are the same at the beginning of all sequences."""
    return sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))


def number_of(text: str) -> float:
    """The text as a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def by_number(text: str) -> tuple[bool, float, list[tuple[float, str]]]:
    """A sort key: numbers by size, then texts, in which digits count as numbers."""
    size = number_of(text)
    parts: list[tuple[float, str]] = []
    for part in _DIGITS.split(text):
        parts.append((float(part), "") if part.isdecimal() else (math.inf, part))
    if math.isfinite(size):
        return False, size, parts
    return True, 0.0, parts


_DIGITS = re.compile(r"(\d{1,15})")


def module_name(path: str) -> str:
    """The path of a module as shown on the page; ``(root)`` for the root module, whose path is empty."""
    return printable(path) if path else "(root)"


def number(value: Any) -> str:
    """``0.8821``, ``1.2e-05``, ``12,345``; a text stays what it is and None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def tick(value: float) -> str:
    """A number on an axis, short: ``1.5k``, ``20M``, ``1e-05``."""
    size = abs(value)
    if 1e9 <= size < 1e12:
        return f"{value / 1e9:.3g}G"
    if 1e6 <= size < 1e12:
        return f"{value / 1e6:.3g}M"
    if 1e4 <= size < 1e12:
        return f"{value / 1e3:.3g}k"
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")


def duration(seconds: float) -> str:
    """``0.9 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(text: Any) -> str:
    """An ISO time as ``2026-11-21 06:55 UTC``."""
    try:
        return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (TypeError, ValueError, OverflowError):
        return "–"

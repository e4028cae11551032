"""`target` and `index`: which tensor of a value, and which part of it. Parsed, never evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hookrun.spec.selector.base import shown

Key = int | str
V = TypeVar("V")
MAX_LENGTH = 1_000
"""Characters of a target or an index."""
MOST = 2**63 - 1
"""The greatest subscript, by absolute value: a tensor has no more elements."""
_STEP = re.compile(
    r"""\[\s*(?P<number>[+-]?\d+)\s*\]
      | \[\s*'(?P<single>[^']*)'\s*\] | \[\s*"(?P<double>[^"]*)"\s*\]
      | \.?(?P<name>[^\W\d]\w*)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Target:
    """A path into a value: integers subscript, strings name a dict key, an attribute or a keyword argument."""

    text: str
    keys: tuple[Key, ...]

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(parse_target)


def parse_target(raw: Any) -> Target:
    """Parse ``[0].logits``, ``hidden_states[-1]``, ``['a key'][1]``; ValueError says where it stops making sense."""
    if isinstance(raw, Target):
        return raw
    text = f"[{_bounded(raw)}]" if isinstance(raw, int) and not isinstance(raw, bool) else raw
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"found {shown(raw)}, expected a path like [0], logits, hidden_states[-1] or ['a key'][1]"
        )
    text, at, keys = _short(text.strip()), 0, list[Key]()
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None or (at == 0 and text.startswith(".")):
            raise ValueError(
                f"found {text!r}, which stops making sense at {text[at:]!r}; "
                "expected a path like [0], logits, hidden_states[-1] or ['a key'][1]"
            )
        number, single, double, name = step.group("number", "single", "double", "name")
        if name is not None and at > 0 and not step.group().startswith("."):
            raise ValueError(f"found {text!r}: a dot is missing before {name!r}")
        keys.append(
            _whole(number) if number is not None else next(k for k in (single, double, name) if k is not None)
        )
        at = step.end()
    return Target(text, tuple(keys))


def path_text(keys: tuple[Key, ...]) -> str:
    """The text of a path, as `parse_target` reads it."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        elif isinstance(key, str) and key.isidentifier():
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text


Item = int | slice | EllipsisType


@dataclass(frozen=True)
class Index:
    """NumPy notation on a tensor: integers, slices and one ellipsis."""

    text: str
    items: tuple[Item, ...]

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(parse_index)


def parse_index(raw: Any) -> Index:
    """Parse ``..., 0:8``, ``:, 3`` or ``-1``; ValueError says which part is wrong."""
    if isinstance(raw, Index):
        return raw
    if isinstance(raw, bool) or not isinstance(raw, int | str) or raw == "":
        raise ValueError(f"found {shown(raw)}, expected NumPy notation in quotes, like '..., 0:8' or ':, 3'")
    text = _short(str(_bounded(raw)).strip())
    items = tuple(_item(part.strip(), text) for part in text.removeprefix("[").removesuffix("]").split(","))
    if items.count(...) > 1:
        raise ValueError(f"found {text!r}: an index has one ... at most")
    return Index(text, items)


def _item(part: str, text: str) -> Item:
    if part == "...":
        return ...
    try:
        numbers = [_whole(number.strip()) if number.strip() else None for number in part.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if not 2 <= len(numbers) <= 3:
        raise ValueError(f"found {part!r} in {text!r}, expected a whole number, a slice like 0:8, or ...")
    if len(numbers) == 3 and (numbers[2] or 1) < 1:
        raise ValueError(f"found {part!r} in {text!r}: torch slices by positive steps only")
    return slice(*numbers)


def _short(text: str) -> str:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"found a text of {len(text):,} characters, expected at most {MAX_LENGTH:,}")
    return text


def _whole(digits: str) -> int:
    """The whole number that ASCII digits say; ValueError for one that cannot be a subscript of a tensor."""
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", digits):
        raise ValueError(f"found {shown(digits)}, expected a whole number of 64 bits")
    return _bounded(int(digits))


def _bounded(raw: V) -> V:
    if isinstance(raw, int) and not -MOST <= raw <= MOST:
        raise ValueError(f"found {shown(raw)}, expected a whole number of 64 bits")
    return raw

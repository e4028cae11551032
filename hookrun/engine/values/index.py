"""`target`: which tensor of a value, and `index`: which part of it. Parsed, never evaluated. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from hookrun.errors import shown

V = TypeVar("V")
MAX_LENGTH = 16_000
"""The largest number of characters of an index, enough for a list of some thousand channels."""
MOST = 2**63 - 1
"""The largest absolute value of a subscript; no tensor has more elements."""
_PAIRED = re.compile(r"[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*")

Item = int | slice | EllipsisType | tuple[int, ...]
"""The subscript of one dimension, or `...` for several; a tuple is a list of positions."""


class IndexRange(NamedTuple):
    """From `start` up to `end` (excluded) in steps of `every`; negative bounds count from the end."""

    start: int | None = None
    end: int | None = None
    every: int = 1

    def __str__(self) -> str:
        bounds: list[int | None] = [self.start, self.end]
        if self.every != 1:
            bounds.append(self.every)
        return ":".join("" if bound is None else str(bound) for bound in bounds)


@dataclass(frozen=True)
class Written:
    """What somebody wrote, parsed; `str()` is the text itself."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Index(Written):
    """NumPy notation on a tensor: whole numbers, slices, one ellipsis, and one list of positions.

    An integer removes its dimension, and a list keeps the position of its dimension, as in torch.
    """

    items: tuple[Item, ...]

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The list of positions in it; None if it has none."""
        for item in self.items:
            if isinstance(item, tuple):
                return item
        return None


def parse_index(raw: Any) -> Index:
    """Parse ``..., 0:8``, ``:, 3``, ``..., [1, 5, 6]`` or ``-1``; ValueError says which part is wrong."""
    if isinstance(raw, list | tuple):
        raise ValueError(
            f"found the list {shown(raw)}, expected NumPy notation in quotes, like '..., [1, 5, 6]'"
        )
    if isinstance(raw, bool) or not isinstance(raw, int | str) or raw == "":
        raise ValueError(f"found {shown(raw)}, expected NumPy notation in quotes, like '..., 0:8' or ':, 3'")
    text = str(bounded(raw)).strip()
    if len(text) > MAX_LENGTH:
        raise ValueError(f"found a text of {len(text):,} characters, expected at most {MAX_LENGTH:,}")
    items = tuple(_item(part, text) for part in _parts(_without_brackets(text)))
    if items.count(...) > 1:
        raise ValueError(f"found {shown(text)}: an index has one ... at most")
    if sum(isinstance(item, tuple) for item in items) > 1:
        raise ValueError(
            f"found {shown(text)}: an index has one list at most, and several would be paired element by element; "
            "use a hook for each, or a slice"
        )
    return Index(text, items)


def parsed_as(kind: type[V], parse: Callable[[Any], V]) -> PlainValidator:
    """The validator of a field that holds a `kind`: `parse` of what was written; one that was read before stays."""
    return PlainValidator(lambda raw: raw if isinstance(raw, kind) else parse(raw))


_SCHEMA = WithJsonSchema({"type": ["string", "integer"]})
AnyIndex = Annotated[Index, parsed_as(Index, parse_index), PlainSerializer(str), _SCHEMA]
"""The type of a pydantic field that holds an index."""


def _without_brackets(text: str) -> str:
    """The text inside outer brackets, ``[0, ::2]``; but ``[0, 2]`` is a list of positions, as in NumPy."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else ""
    is_list = not re.search(r"[:.\[\]]", inner)
    return text if not inner or is_list or not _PAIRED.fullmatch(inner) else inner


def _parts(text: str) -> list[str]:
    """The text split at commas outside of lists. ValueError for unbalanced brackets."""
    if not _PAIRED.fullmatch(text):
        raise ValueError(f"found {shown(text)}, which cannot be read: a list is written as [1, 5, 6]")
    return [part.strip() for part in re.findall(r"((?:[^,\[\]]|\[[^\[\]]*\])*),", f"{text},")]


def _item(part: str, text: str) -> Item:
    """One subscript. ValueError if it cannot be read."""
    where = f"found {shown(part)} in {shown(text)}"
    if part == "...":
        return ...
    if part.startswith("["):
        try:
            positions = tuple(whole(number.strip()) for number in part[1:-1].split(","))
        except ValueError:
            raise ValueError(f"{where}, expected a list of whole numbers like [1, 5, 6]") from None
        unique = set(positions)
        for number in positions if len(unique) < len(positions) else ():
            if number not in unique:
                raise ValueError(f"{where}: it holds {number} twice, name each position once")
            unique.remove(number)
        return positions
    place = number_or_range(part)
    if place is None:
        raise ValueError(
            f"{where}, expected a whole number, a slice like 0:8, or ..., or a list like [1, 5, 6]"
        )
    if isinstance(place, int):
        return place
    if place.every < 1:
        raise ValueError(f"{where}: torch slices by positive steps only")
    return slice(place.start, place.end, None if place.every == 1 else place.every)


def number_or_range(text: str) -> int | IndexRange | None:
    """``3`` -> 3, ``0:`` -> all from 0 on, ``::2`` -> every second one; None if it is neither."""
    try:
        numbers = [whole(part.strip()) if part.strip() else None for part in text.split(":")]
    except ValueError:
        return None
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) > 3:
        return None
    start, end, every = (*numbers, None)[:3]
    return IndexRange(start, end, 1 if every is None else every)


def whole(digits: str) -> int:
    """The integer of a text of ASCII digits; ValueError if it cannot be a subscript of a tensor."""
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", digits):
        raise ValueError(f"found {shown(digits)}, expected a whole number of 64 bits")
    return bounded(int(digits))


def bounded(raw: V) -> V:
    """The value; ValueError for an integer that cannot be a subscript of a tensor."""
    if isinstance(raw, int) and not -MOST <= raw <= MOST:
        raise ValueError(f"found {shown(raw)}, expected a whole number of 64 bits")
    return raw


Key = int | str
MAX_TARGET = 1_000
"""Characters of a target."""
_STEP = re.compile(
    r"""\[\s*(?P<number>[+-]?\d+)\s*\]
      | \[\s*'(?P<single>[^']*)'\s*\] | \[\s*"(?P<double>[^"]*)"\s*\]
      | \.?(?P<name>[^\W\d]\w*)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Target(Written):
    """A path into a value: integers subscript, strings name a dict key, an attribute or a keyword argument."""

    keys: tuple[Key, ...]


def parse_target(raw: Any) -> Target:
    """Parse ``[0].logits``, ``hidden_states[-1]``, ``['a key'][1]``; ValueError says where it cannot be read."""
    text = f"[{bounded(raw)}]" if isinstance(raw, int) and not isinstance(raw, bool) else raw
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"found {shown(raw)}, expected a path in quotes, like '[0]', logits, hidden_states[-1] or ['a key'][1]"
        )
    text = text.strip()
    at = 0
    keys: list[Key] = []
    if len(text) > MAX_TARGET:
        raise ValueError(f"found a text of {len(text):,} characters, expected at most {MAX_TARGET:,}")
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None or (at == 0 and text.startswith(".")):
            raise ValueError(
                f"found {text!r}, which cannot be read from {text[at:]!r} on; "
                "expected a path like [0], logits, hidden_states[-1] or ['a key'][1]"
            )
        name = step["name"]
        if name is not None and at > 0 and not step.group().startswith("."):
            raise ValueError(f"found {text!r}: a dot is missing before {name!r}")
        kind = str(step.lastgroup)  # the one group that matched
        keys.append(whole(step[kind]) if kind == "number" else step[kind])
        at = step.end()
    return Target(text, tuple(keys))


AnyTarget = Annotated[Target, parsed_as(Target, parse_target), PlainSerializer(str), _SCHEMA]
"""The type of a pydantic field that holds a target."""


def path_text(keys: tuple[Key, ...]) -> str:
    """The text of a path, as `parse_target` reads it."""
    text = ""
    for key in keys:
        if not isinstance(key, str) or not key.isidentifier():
            text += f"[{key!r}]"
        elif text:
            text += f".{key}"
        else:
            text = key
    return text


def joined(outer: str, inner: str) -> str:
    """The path of a member that is at `inner` in what is at `outer`."""
    return f"{outer}.{inner}" if outer and inner and not inner.startswith("[") else outer + inner

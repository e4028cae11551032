"""`tokens`: which positions of a sequence a hook reads or changes, not counting padding. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from hookrun.engine.validation import Section
from hookrun.engine.values.index import IndexRange as TokenRange
from hookrun.engine.values.index import bounded, number_or_range, parsed_as
from hookrun.errors import shown

ALL = "all"
EXPECTED = "expected a position like -1, a range like '4:8', a list of them, or all"


Place = int | TokenRange
"""One position or a range of them; a negative number counts from the end of the prompt."""


@dataclass(frozen=True)
class Positions:
    """Positions in a sequence, counted from its first real token."""

    places: tuple[Place, ...]

    def __str__(self) -> str:
        texts = [ALL if place == TokenRange() else str(place) for place in self.places]
        return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"

    @property
    def numbers(self) -> Iterator[int]:
        """Every number in it, including the bounds of ranges."""
        for place in self.places:
            bounds = (place.start, place.end) if isinstance(place, TokenRange) else (place,)
            yield from (bound for bound in bounds if bound is not None)


def parse_positions(raw: Any) -> Positions:
    """Parse ``-1``, ``"4:8"``, ``[0, "4:8", -1]`` or ``{start: 0, end: 5}``; ValueError says what is wrong."""
    if isinstance(raw, dict):
        return Positions((_range(raw),))
    places = _listed(raw)
    if not places:
        raise ValueError(f"found an empty list, {EXPECTED}")
    return Positions(tuple(map(_place, places)))


def _place(raw: Any) -> Place:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return bounded(raw)
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"found {shown(raw)}, {EXPECTED}")
    if raw.strip() == ALL:
        return TokenRange()
    place = number_or_range(raw)
    if place is None:
        raise ValueError(f"found {shown(raw)}, {EXPECTED}")
    return place if isinstance(place, int) else _checked_range(place, raw)


def _range(raw: dict[Any, Any]) -> TokenRange:
    unknown = [key for key in raw if key not in ("start", "end", "every")]
    if unknown or not raw:
        wrong = shown(unknown[0]) if unknown else "nothing"
        raise ValueError(f"found {wrong} in a range, expected start, end or every")
    for bound in raw.values():
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise ValueError(f"found {shown(bound)} in a range, expected a whole number")
        bounded(bound)
    return _checked_range(TokenRange(raw.get("start"), raw.get("end"), raw.get("every", 1)), raw)


def _checked_range(places: TokenRange, raw: Any) -> TokenRange:
    start, end = places.start, places.end
    if places.every is None or places.every < 1:
        raise ValueError(f"found {shown(raw)}: the step of a range is at least 1")
    one_way = start is not None and end is not None and (start < 0) == (end < 0)
    if end == 0 or (one_way and end <= start):  # type: ignore[operator]
        raise ValueError(f"found {shown(raw)}: the range ends before it begins, and holds no position")
    return places


def _as_mapping(raw: Any) -> Any:
    """Turn the short forms (a position, a range, a list or `all`) into a mapping."""
    return raw if isinstance(raw, dict | BaseModel) else {"position": parse_positions(raw)}


def _listed(raw: Any) -> Any:
    return raw if isinstance(raw, list | tuple) else (raw,)


_POSITIONS = {
    "anyOf": [
        {"type": ["integer", "string"]},
        {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1},
        {
            "type": "object",
            "properties": {key: {"type": "integer"} for key in ("start", "end", "every")},
            "additionalProperties": False,
        },
    ]
}
Id = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1, max_length=10_000)]


Short = int | str | list[int | str]
"""Positions as they may be written without a mapping, for the JSON Schema."""


class TokenSet(Section):
    """Tokens for which all given conditions hold."""

    position: (
        Annotated[
            Positions,
            parsed_as(Positions, parse_positions),
            PlainSerializer(str, when_used="json"),
            WithJsonSchema(_POSITIONS),
        ]
        | None
    ) = None
    id: (
        Annotated[
            tuple[Id, ...],
            BeforeValidator(_listed, json_schema_input_type=Id | list[Id]),
            Field(min_length=1),
        ]
        | None
    ) = None
    text: (
        Annotated[
            tuple[Text, ...],
            BeforeValidator(_listed, json_schema_input_type=Text | list[Text]),
            Field(min_length=1),
        ]
        | None
    ) = None
    span: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None

    @field_validator("position", "id", "text", "span", mode="before")
    @classmethod
    def _is_given(cls, raw: Any) -> Any:
        if raw is None:
            raise ValueError("found nothing: leave the key out, or give it a value")
        return raw

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"found an empty mapping, expected one of {', '.join(type(self).model_fields)}")
        return self

    def __str__(self) -> str:
        if self.model_fields_set == {"position"}:
            return str(self.position)
        parts = []
        for key in type(self).model_fields:  # in the order of the class
            if key in self.model_fields_set:
                value = getattr(self, key)
                if isinstance(value, tuple):
                    value = value[0] if len(value) == 1 else list(value)
                if isinstance(value, bool):
                    value = str(value).lower()
                parts.append(f"{key}: {value}")
        return "{" + ", ".join(parts) + "}"


class TokenFilter(TokenSet):
    """Tokens of a phase, except those of `exclude`.

    phase: `prompt`, or `generation`: positions then count from the first generated token
    """

    phase: Literal["prompt", "generation"] | None = None
    exclude: (
        Annotated[
            TokenSet,
            BeforeValidator(_as_mapping, json_schema_input_type=Short | TokenSet),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _counts_forward_in_generation(self) -> Self:
        if self.phase != "generation":
            return self
        sets = {"position": self.position, "exclude.position": self.exclude and self.exclude.position}
        for key, positions in sets.items():
            for number in positions.numbers if positions else ():
                if number < 0:
                    raise ValueError(
                        f"{key}: found {number} under `phase: generation`: negative positions count from the end of "
                        "the prompt, which has no generated tokens; count from 0, the first generated token"
                    )
        return self

    @property
    def texts(self) -> Iterator[str]:
        """Every text in it, which a tokenizer has to turn into tokens."""
        for tokens in filter(None, (self, self.exclude)):
            yield from tokens.text or ()

    @property
    def spans(self) -> Iterator[str]:
        """The names of every span in it."""
        for tokens in filter(None, (self, self.exclude)):
            if tokens.span is not None:
                yield tokens.span


Axis = Annotated[
    TokenFilter,
    BeforeValidator(_as_mapping, json_schema_input_type=Short | TokenFilter),
]


class Tokens(TokenFilter):
    """The `tokens` key of a hook.

    missing: `skip` leaves out positions that a sample does not have; otherwise they are an error
    padding: padding counts as tokens too
    dim:     the dimension of the sequence, counted with the batch first, by default 1
    query:   on attention patterns [..., queries, keys]: which queries; then `key` may say which keys
    """

    missing: Literal["error", "skip"] = "error"
    padding: Annotated[bool, Field(strict=True)] = False
    dim: Annotated[int, Field(strict=True, ge=1, le=63)] | None = None
    query: Axis | None = None
    key: Axis | None = None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if self.query is None and self.key is None:
            return self
        others = self.model_fields_set - {"query", "key", "missing", "padding"}
        if others:
            text = f"{sorted(others)[0]} does not go with query and key, whose dimensions are the last two"
            if others != {"dim"}:
                text += ": give it to one of them, as in {query: {phase: prompt, position: -1}}"
            raise ValueError(text)
        return self

    @property
    def on_pattern(self) -> bool:
        """Whether it selects queries and keys of attention patterns."""
        return self.query is not None or self.key is not None

    @property
    def filters(self) -> tuple[TokenFilter, ...]:
        """Itself, or the filters of queries and keys."""
        return tuple(filter(None, (self.query, self.key))) or (self,)


TokensClause = Annotated[Tokens, BeforeValidator(_as_mapping, json_schema_input_type=Short | Tokens)]

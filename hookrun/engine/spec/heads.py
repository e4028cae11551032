"""`heads`: which attention heads of a value a hook looks at or changes. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from hookrun.engine.validation import Section
from hookrun.errors import shown

MOST_HEADS = 1_000_000


def _listed(raw: Any) -> Any:
    if isinstance(raw, bool) or not isinstance(raw, int | list | tuple):
        raise ValueError(f"found {shown(raw)}, expected the numbers of heads, like [3, 5]")
    return (raw,) if isinstance(raw, int) else raw


Head = Annotated[int, Field(strict=True, ge=-MOST_HEADS, lt=MOST_HEADS)]


class Heads(Section):
    """Some of the attention heads of a value.

    pick:  numbers of the heads, from 0; negative ones count from the end
    count: how many heads the value has; by default the model's configuration says it, and the names of modules say
           where the last dimension holds them
    dim:   the dimension of the heads, needed if several dimensions of the value have that size
    """

    pick: Annotated[
        tuple[Head, ...],
        BeforeValidator(_listed, json_schema_input_type=Head | list[Head]),
        Field(min_length=1),
    ]
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_HEADS)] | None = None
    dim: Annotated[int, Field(strict=True, ge=1, le=63)] | None = None

    @model_validator(mode="after")
    def _names_each_once(self) -> Heads:
        for head in self.pick:
            if self.pick.count(head) > 1:
                raise ValueError(f"names head {head} twice: name each head once")
        wrong = None if self.count is None else self.misfit(self.count)
        if wrong is not None:
            raise ValueError(wrong)
        return self

    def misfit(self, count: int) -> str | None:
        """What is wrong with these heads if the value has `count` heads, or None."""
        beyond = [head for head in self.pick if not -count <= head < count]
        if beyond:
            return f"there is no head {beyond[0]} among {count}, which are 0 to {count - 1}"
        if len({head % count for head in self.pick}) < len(self.pick):
            return f"names a head of {count} twice, from the start and from the end"
        return None

    def __str__(self) -> str:
        pick = str(list(self.pick))
        if self.count is None and self.dim is None:
            return pick
        parts = [] if self.count is None else [f"count: {self.count}"]
        if self.dim is not None:
            parts.append(f"dim: {self.dim}")
        return "{" + ", ".join([*parts, f"pick: {pick}"]) + "}"


HeadsClause = Annotated[
    Heads,
    BeforeValidator(
        lambda raw: raw if isinstance(raw, dict | BaseModel) else {"pick": raw},
        json_schema_input_type=Head | list[Head] | Heads,
    ),
]

"""The samples that `capture` keeps, as its configuration names them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]


class OneOf(BaseModel):
    """Exactly one of the fields is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"give one of {', '.join(type(self).model_fields)}")
        return self

    def __str__(self) -> str:
        (name,) = self.model_fields_set
        given = getattr(self, name)
        return name if given is None else f"{name} {given if isinstance(given, int) else list(given)}"


class Keep(OneOf):
    """One of: `every` n-th sample of the data set, or a `reservoir` of n samples drawn at random from all."""

    every: Count | None = None
    reservoir: Count | None = None

"""The types of the fields of actions; from some the rest of the program knows what the field means."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hookrun.engine.actions.values import Ramp, Scheduled, Value, at_step, numbers
from hookrun.engine.validation import Section

T = TypeVar("T")


def not_nan(value: Any) -> Any:
    """The value; ValueError if one of its numbers is NaN."""
    if any(map(math.isnan, numbers(value))):
        raise ValueError("found nan, which is neither above nor below any number")
    return value


def _not_negative(value: Any) -> Any:
    if any(number < 0 for number in numbers(value)):
        raise ValueError(f"found {value}, expected no number below 0")
    return value


def _own_name(name: str) -> str:
    if not name or "." in name:
        raise ValueError(f"found {name!r}, expected a parameter of the module itself: its name has no dot")
    return name


def _listed(raw: Any) -> Any:
    if not isinstance(raw, str | list | tuple):
        raise ValueError(f"found {raw!r}, expected a name or a list of names")
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise ValueError("the list is empty")
    return raw


Number = Annotated[float, Field(strict=True), AfterValidator(not_nan)]
"""A number, possibly infinite; texts and booleans are refused."""

Bound = Annotated[Value, AfterValidator(not_nan)]
"""A number, or values that broadcast to the tensor's shape; an infinite value means no bound."""

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number."""

NotNegative = Annotated[Scheduled, AfterValidator(_not_negative)]
"""A finite number from 0 on, which may follow the clock; `HookSite.number` gives it."""

OwnName = Annotated[str, AfterValidator(_own_name)]
"""The name of a parameter of the module itself, not of its children."""


class Meaning(Enum):
    """What a field means to the rest of the program, written into its type; `Action.value_of` has its value."""

    SEED = auto()
    BYTE_LIMIT = auto()
    SAMPLES = auto()
    POLICY = auto()
    ADDED_NAME = auto()
    TRAINABLE = auto()
    OWN_FUNCTION = auto()
    ARGUMENTS = auto()


Seed = Annotated[Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None, Meaning.SEED]
"""The seed of the hook's random numbers; None: derived from the seed of the experiment."""

Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]

ByteLimit = Annotated[Count | None, Meaning.BYTE_LIMIT]
"""The maximum number of bytes that the hook keeps, over all its modules; None: no limit."""

Policy = Annotated[Literal["error", "stop", "warn"], Meaning.POLICY]
"""What follows from a failed check; under `stop` one of its records may end the run."""

Trainable = Annotated[bool, Meaning.TRAINABLE]
"""Whether the operand is a parameter `<hook name>_bias` that the hook adds to its modules."""


class OneOf(Section):
    """Exactly one of the fields is given."""

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


KeptSamples = Annotated[Keep | None, Meaning.SAMPLES]
"""Which samples the hook keeps; None: all."""


class OrOne:
    """In the type of a list: its JSON Schema lets one item stand for a list of it, as a validator does."""

    def __get_pydantic_json_schema__(
        self, core: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        several = handler(core)
        return {"anyOf": [several["items"], several]}


OneOrMore = Annotated[tuple[T, ...], BeforeValidator(_listed), OrOne()]
"""One name, or a list of at least one."""


def check_order(low: Any, high: Any) -> None:
    """ValueError if a lower bound is greater than the upper bound of the same element, at any step.

    Numbers and nested lists are compared; None, and values that are known later, are not.
    """
    for step in {step for bound in (low, high) if isinstance(bound, Ramp) for step in bound.steps}:
        check_order(at_step(low, step), at_step(high, step))
    if isinstance(low, float | tuple) and isinstance(high, float | tuple):
        import numpy as np

        try:
            lows, highs = np.broadcast_arrays(low, high)
        except ValueError:
            shapes = list(np.shape(low)), list(np.shape(high))
            raise ValueError(f"min has shape {shapes[0]} where max has {shapes[1]}") from None
        if (wrong := lows > highs).any():
            raise ValueError(f"min {lows[wrong][0]} is greater than max {highs[wrong][0]}")

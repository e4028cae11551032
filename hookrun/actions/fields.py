"""Field types and validators that several actions share."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

T = TypeVar("T")


def _not_nan(value: float) -> float:
    if math.isnan(value):
        raise ValueError("found nan, which is neither above nor below any number")
    return value


def _own_name(name: str) -> str:
    if not name or "." in name:
        raise ValueError(f"found {name!r}, expected a parameter of the module itself: its name has no dot")
    return name


def _listed(raw: Any) -> Any:
    if not isinstance(raw, str | list | tuple):
        raise ValueError(f"found {raw!r}, expected a name or a list of names")
    return [raw] if isinstance(raw, str) else raw


def _not_empty(names: tuple[T, ...]) -> tuple[T, ...]:
    if not names:
        raise ValueError("the list is empty")
    return names


Number = Annotated[float, Field(strict=True), AfterValidator(_not_nan)]
"""A number, possibly infinite; texts and booleans are refused."""

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number."""

OwnName = Annotated[str, AfterValidator(_own_name)]
"""The name of a parameter of the module itself, not of its children."""

OneOrMore = Annotated[tuple[T, ...], BeforeValidator(_listed), AfterValidator(_not_empty)]
"""One name, or a list of at least one."""


def check_order(low: float | None, high: float | None) -> None:
    """ValueError if both bounds are given and the lower one is greater than the upper one."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"min {low} is greater than max {high}")

"""Arguments from YAML: what fits is taken as it is, and every mistake has a key, what was found and the next step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from hookrun.data.args import Args, parse
from hookrun.errors import Problem


class Example(Args):
    """Arguments of every kind."""

    size: int | list[int] = 1
    rate: float = Field(default=0.5, ge=0)
    mode: Literal["fast", "slow"] = "fast"
    few: int | Annotated[list[int], Field(max_length=2)] = 1
    needed: str

    @model_validator(mode="after")
    def _together(self) -> Example:
        if self.mode == "slow" and self.rate == 0:
            raise ValueError("slow needs a rate")
        return self


def problems(**given: Any) -> list[Problem]:
    args, found = parse(Example, given, "data.args")
    assert (args is None) == bool(found)
    return found


def test_right_arguments_have_no_problem() -> None:
    args, found = parse(Example, {"needed": "x", "size": [1, 2], "rate": 1}, "data.args")
    assert (args, found) == (Example(needed="x", size=[1, 2], rate=1), [])


def test_arguments_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example(needed="x").rate = 1.0  # type: ignore[misc]


def test_an_unknown_key_comes_with_the_nearest_name() -> None:
    assert problems(needed="x", rat=1) == [Problem("data.args.rat", "unknown key", "did you mean 'rate'?")]


def test_a_missing_key_is_named() -> None:
    assert problems() == [Problem("data.args.needed", "is missing", "add `needed:`")]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"rate": -1}, "found -1: expected greater than or equal to 0"),
        ({"rate": float("nan")}, "found nan: expected a finite number"),
        ({"mode": "fats"}, "found 'fats': expected 'fast' or 'slow'"),
        ({"size": True}, "found True: expected a valid integer or a valid list"),
        ({"size": [1, "a", 2.5]}, "found [1, 'a', 2.5]: expected a valid integer"),
        (
            {"few": [1, 2, 3]},
            "found [1, 2, 3]: expected a valid integer; list should have at most 2 items, not 3",
        ),
        ({"size": None}, "found None: expected a valid integer or a valid list"),
    ],
)
def test_a_wrong_value_is_one_problem_that_shows_it(given: dict[str, Any], what: str) -> None:
    (problem,) = problems(needed="x", **given)
    assert problem.where == f"data.args.{next(iter(given))}"
    assert problem.what == what


def test_values_are_not_converted() -> None:
    assert [p.where for p in problems(needed=1, size="2", rate="3")] == [
        "data.args.size",
        "data.args.rate",
        "data.args.needed",
    ]


def test_what_is_wrong_between_arguments_stands_at_their_mapping() -> None:
    assert problems(needed="x", mode="slow", rate=0) == [Problem("data.args", "slow needs a rate")]


def test_all_mistakes_are_found_at_once() -> None:
    assert {p.where for p in problems(rat=1, size="x", mode="y")} == {
        "data.args.rat",
        "data.args.size",
        "data.args.mode",
        "data.args.needed",
    }

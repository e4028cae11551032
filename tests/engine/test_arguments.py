"""Arguments are checked against a model or a signature: each mistake is one problem with its key path."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hookrun.engine.validation import (
    Args,
    missing_arguments,
    parameters,
    parse,
    paths_to,
    unknown_arguments,
)
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


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"rate": -1}, "found -1: expected greater than or equal to 0"),
        ({"rate": float("nan")}, "found nan: expected a finite number"),
        ({"mode": "fats"}, "found 'fats': expected 'fast' or 'slow'"),
        ({"size": True}, "found True: expected a valid integer or a valid list"),
        ({"size": [1, "a", 2.5]}, "found [1, 'a', 2.5]: expected a valid integer"),
        ({"few": [1, 2, 3]}, "list should have at most 2 items, not 3"),
        ({"size": None}, "found None: expected a valid integer or a valid list"),
    ],
)
def test_a_wrong_value_is_one_problem_that_shows_it(given: dict[str, Any], what: str) -> None:
    (problem,) = problems(needed="x", **given)
    assert problem.where == f"data.args.{next(iter(given))}"
    assert problem.what.endswith(what)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [Problem("data.args.needed", "is missing", "add `needed:`")]),
        ({"needed": "x", "rat": 1}, [Problem("data.args.rat", "unknown key", "did you mean 'rate'?")]),
        ({"needed": "x", "mode": "slow", "rate": 0}, [Problem("data.args", "slow needs a rate")]),
        ({"needed": 1, "size": "2", "rate": "3"}, {"size", "rate", "needed"}),  # values are not converted
        ({"rat": 1, "size": "x", "mode": "y"}, {"rat", "size", "mode", "needed"}),
    ],
)
def test_all_mistakes_are_told_together_at_their_keys(given: dict[str, Any], expected: Any) -> None:
    found = problems(**given)
    keys = {problem.where.removeprefix("data.args.") for problem in found}
    assert expected == (found if isinstance(expected, list) else keys)


class Inner(Args):
    """A section in a section."""

    rate: float = Field(default=0.5, ge=0)
    mode: Literal["fast", "slow"] = "fast"


class Outer(Args):
    """Sections below keys, lists and unions."""

    one: Inner = Inner()
    maybe: Inner | None = None
    each: list[Inner] = []
    named: dict[str, Inner | None] = {}
    either: Inner | int = 1


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"one": {"rate": -1}}, "x.one.rate"),
        ({"maybe": {"rate": -1}}, "x.maybe.rate"),
        ({"each": [{}, {"rate": -1}]}, "x.each.1.rate"),
        ({"named": {"a": None, "b": {"rate": -1}}}, "x.named.b.rate"),
        ({"either": {"rate": -1}}, "x.either"),
    ],
)
def test_the_key_path_follows_sections_without_members_of_unions(given: dict[str, Any], where: str) -> None:
    (problem,) = parse(Outer, given, "x")[1]
    assert problem.where == where
    assert "greater than or equal to 0" in problem.what


@pytest.mark.parametrize(
    ("given", "where", "hint"),
    [
        ({"one": {"rat": 1}}, "x.one.rat", "did you mean 'rate'?"),
        ({"maybe": {"rat": 1}}, "x.maybe.rat", "did you mean 'rate'?"),
        ({"named": {"a": {"rat": 1}}}, "x.named.a.rat", "did you mean 'rate'?"),
        ({"maybe": 3}, "x.maybe", "its keys: rate, mode"),
        ({"one": {"mode": "fats"}}, "x.one.mode", "did you mean 'fast'?"),
    ],
)
def test_a_mistake_in_an_inner_section_has_the_nearest_name(given: Any, where: str, hint: str) -> None:
    (problem,) = parse(Outer, given, "x")[1]
    assert problem.where == where
    assert problem.hint == hint


def test_an_unknown_argument_is_reported_with_the_nearest_name() -> None:
    [problem] = unknown_arguments({"widht": 3, "depth": 2}, ["width", "depth"], "model.args", "net")
    assert problem.where == "model.args.widht"
    assert problem.what == "'net' takes no argument 'widht'; did you mean 'width'?"


def test_a_signature_lists_its_names_unless_it_accepts_any() -> None:
    def fixed(a: int, *, b: int = 1) -> None: ...
    def positional(a: int, /, b: int) -> None: ...
    def anything(a: int, **rest: int) -> None: ...

    assert list(parameters(fixed) or ()) == ["a", "b"]
    assert list(parameters(positional) or ()) == ["b"]
    assert parameters(anything) is None


def test_only_a_parameter_without_default_can_be_missing() -> None:
    def fixed(a: int, b: int, c: int = 1) -> None: ...

    found = parameters(fixed) or {}
    needed = Problem("x.a", "is missing: 'net' needs it", "set x.a")
    assert missing_arguments({"b": None}, found, "x", "net") == [needed]
    problem = missing_arguments({}, found, "x", "net", why="no {}".format)[1]
    assert problem == Problem("x.b", "is missing: 'net' needs it; no b", "set x.b")


class AnyKeys(BaseModel):
    """A section with keys that only its default shows."""

    model_config = ConfigDict(extra="allow")
    name: str = "AdamW"


class Trained(Args):
    """A section that holds others."""

    size: int = 1
    inner: Inner | None = None
    optimizer: AnyKeys = AnyKeys.model_validate({"lr": 0.1})


class Rooted(Args):
    """The root."""

    outer: Trained = Trained()
    depth: Inner = Inner()


def test_a_key_of_a_section_further_down_is_told_with_its_path() -> None:
    assert paths_to("rate", Trained) == ["inner.rate"]
    assert paths_to("lr", Trained) == ["optimizer.lr"]
    assert paths_to("rate", Rooted) == ["depth.rate"], "the shortest ones"
    assert paths_to("lr", Rooted) == ["outer.optimizer.lr"]
    assert paths_to("size", Trained) == []
    _, (found,) = parse(Trained, {"lr": 3}, "train")
    assert found == Problem("train.lr", "unknown key", "did you mean 'train.optimizer.lr'?")
    _, (found,) = parse(Trained, {"sise": 3}, "train")
    assert found.hint == "did you mean 'size'?"

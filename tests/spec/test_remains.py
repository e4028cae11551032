"""The valid parts of a configuration with mistakes, and the problems in the order of the file."""

from __future__ import annotations

from pydantic import BaseModel

from hookrun.errors import Problem
from hookrun.spec.remains import beyond, in_file_order, validated
from hookrun.spec.section import Section


class Inner(Section):
    size: int = 1


class Outer(Section):
    name: str
    count: int = 5
    inner: Inner = Inner()


def test_invalid_keys_get_their_defaults_and_the_rest_is_kept() -> None:
    given = {"name": "a", "count": "x", "inner": {"size": "y", "sise": 2}, "cuont": 3}
    section, problems = validated(Outer, given, "top")
    assert section == Outer(name="a")
    assert sorted(each.where for each in problems) == [
        "top.count", "top.cuont", "top.inner.sise", "top.inner.size",
    ]  # fmt: skip
    assert given["cuont"] == 3, "the configuration itself is not changed"


def test_a_key_without_a_default_needs_a_replacement() -> None:
    section, problems = validated(Outer, {"name": 3, "count": 7}, "")
    assert section is None and [each.where for each in problems] == ["name"]
    section, problems = validated(Outer, {"name": 3, "count": 7}, "", {"name": "?"})
    assert section == Outer(name="?", count=7) and [each.where for each in problems] == ["name"]


def test_a_valid_section_has_no_problems() -> None:
    found: tuple[BaseModel | None, list[Problem]] = validated(Outer, {"name": "a", "inner": {"size": 2}}, "")
    assert found == (Outer(name="a", inner=Inner(size=2)), [])


def test_problems_that_follow_from_a_mistake_are_left_out() -> None:
    known = [Problem("model.args", "is wrong"), Problem("hooks.a", "is wrong")]
    found = [
        Problem("model.args.width", "is missing"),
        Problem("hooks.a.select", "x"),
        Problem("hooks.a", "y"),
    ]
    assert [each.where for each in beyond(found, known)] == ["hooks.a.select"]


def test_the_order_is_that_of_the_file_and_each_is_reported_once() -> None:
    written = {"b": {"y": 1, "x": 2}, "a": 3}
    problems = [Problem(where, "") for where in ("", "a", "b.z", "b.x", "b.y.q", "b", "c", "a")]
    assert [each.where for each in in_file_order(problems, written)] == [
        "",
        "b",
        "b.y.q",
        "b.x",
        "b.z",
        "a",
        "c",
    ]

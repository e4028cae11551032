"""The names that selectors are matched against: modules, parameters below them, second names of one object."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.spec.selector import Names, Node, Tree, parse_selector
from hookrun.spec.selector.tree import ancestors

MODULES = Tree({name: Node(name, frozenset({"M"})) for name in ("", "a", "a.b", "c")})
PARAMETERS = Tree({name: Node(name, frozenset({"M"})) for name in ("w", "a.w", "a.b.w", "a.b.bias", "c.w")})


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ("a", ["a.w", "a.b.w", "a.b.bias"]),
        ("a.w", ["a.w"]),
        ("**.bias", ["a.b.bias"]),
        ("*", ["w", "a.w", "a.b.w", "a.b.bias", "c.w"]),
        ("", ["w", "a.w", "a.b.w", "a.b.bias", "c.w"]),
        ({"path": "**", "exclude": "a"}, ["w", "c.w"]),
        ({"path": "**", "exclude": "**.bias"}, ["w", "a.w", "a.b.w", "c.w"]),
        (["c", "**.bias"], ["c.w", "a.b.bias"]),
    ],
)
def test_a_module_selects_the_parameters_below_it(raw: Any, names: list[str]) -> None:
    assert parse_selector(raw).select_parameters(MODULES, PARAMETERS) == set(names)


def test_removing_one_name_of_an_object_removes_all_of_them() -> None:
    tree = Tree({name: Node(name) for name in ("a", "b", "c")}, first={"b": "a"})
    assert tree.without(["a", "b", "c"], ["b"]) == {"c"}
    assert tree.ordered({"c", "a"}) == ["a", "c"]


def test_ancestors_end_at_the_root() -> None:
    assert list(ancestors("a.b.weight")) == ["a.b", "a", ""]
    assert list(ancestors("")) == []


def test_names_for_hints_are_the_root_s_children_or_else_all() -> None:
    assert Names(("", "h", "h.0"), ("h.0.w",)).children == ["h"]
    assert Names(("",), ("w",)).children == ["w"]
    assert Names(("", "h"), ("w",)).paths == ["h", "w"]

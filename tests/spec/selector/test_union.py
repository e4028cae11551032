"""A list of selectors: everything that any of its members matches."""

from __future__ import annotations

import pytest

from hookrun.spec.selector import Node, Tree, parse_selector

TREE = Tree({name: Node(name) for name in ("conv", "attn", "attn.q", "fc")})


def test_each_module_is_found_once_in_the_order_of_the_model() -> None:
    assert parse_selector(["fc", "conv", "fc", "c*"]).select(TREE) == ["conv", "fc"]
    assert parse_selector([{"path": "fc"}, ["attn"]]).select(TREE) == ["attn", "fc"]


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="the list is empty"):
        parse_selector([])


def test_members_that_match_nothing_are_named_by_their_index() -> None:
    found = parse_selector(["fc", ["conv", "x"], "y"]).unmatched(TREE)
    assert [(str(each.selector), each.place) for each in found] == [
        ("x", "member 2 of member 2 of the list"),
        ("y", "member 3 of the list"),
    ]


def test_members_of_parameter_hooks_match_parameters() -> None:
    parameters = Tree({name: Node(name) for name in ("attn.q.weight", "fc.weight")})
    selector = parse_selector(["attn", "fc.weight", "conv"])
    assert selector.select_parameters(TREE, parameters) == {"attn.q.weight", "fc.weight"}
    assert [each.place for each in selector.unmatched(TREE, parameters)] == ["member 3 of the list"]

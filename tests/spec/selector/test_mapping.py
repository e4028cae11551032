"""A mapping of conditions, which must all hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hookrun.spec.selector import Node, Tree, parse_selector

TREE = Tree(
    {
        "": Node("", frozenset({"Net"}), leaf=False, parameters=60),
        "conv": Node("conv", frozenset({"Conv2d"}), parameters=10),
        "h": Node("h", frozenset({"Block"}), leaf=False, parameters=40),
        "h.conv": Node("h.conv", frozenset({"Conv2d"}), parameters=30),
        "h.fc": Node("h.fc", frozenset({"Linear"}), parameters=10),
        "fc": Node("fc", frozenset({"Linear"}), parameters=10),
        "same": Node("same", frozenset({"Linear"}), parameters=10),
    },
    first={"same": "fc"},
)


@pytest.mark.parametrize(
    ("raw", "paths"),
    [
        ({"path": "h.**", "type": "Conv2d"}, ["h.conv"]),
        ({"type": ["Linear", "Conv2d"], "exclude": "h.**"}, ["conv", "fc", "same"]),
        ({"type": "type:Linear"}, ["h.fc", "fc", "same"]),
        ({"path": "*", "exclude": ["conv", "h"]}, ["fc", "same"]),
        ({"path": "*", "leaf": False}, ["h"]),
        ({"path": "*", "leaf": True}, ["conv", "fc", "same"]),
        ({"min_params": 40}, ["", "h"]),
        ({"path": "*", "exclude": "same"}, ["conv", "h"]),  # the same object as fc
    ],
)
def test_all_conditions_must_hold(raw: dict[str, Any], paths: list[str]) -> None:
    assert parse_selector(raw).select(TREE) == paths


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({}, "the mapping is empty"),
        ({"typ": "Conv2d"}, "did you mean 'type'?"),
        ({"leaf": "yes"}, "leaf: found 'yes', expected true or false"),
        ({"min_params": -1}, "expected a whole number"),
        ({"min_params": True}, "expected a whole number"),
        ({"exclude": 1.5}, "exclude: found the number 1.5"),
        ({"type": []}, "expected a class name or a list of them"),
    ],
)
def test_a_wrong_condition_is_refused_with_its_key(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_selector(raw)


def test_its_text_reads_as_yaml() -> None:
    assert str(parse_selector({"path": ["a", "b"], "leaf": True})) == "{path: [a, b], leaf: true}"


def test_members_that_match_nothing_are_named_by_their_key_and_excluded_ones_are_not() -> None:
    selector = parse_selector({"path": ["h.*", "x"], "exclude": ["y"]})
    assert [(str(each.selector), each.place) for each in selector.unmatched(TREE)] == [
        ("x", "member 2 of `path`")
    ]

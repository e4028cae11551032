"""A choice of parameters: selectors, `hook:NAME`, or a list of both."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.spec.parameters import AddedBy, parse_choice


def test_a_selector_a_hook_or_a_list() -> None:
    assert parse_choice("hook:lora").members == (AddedBy("lora"),)
    assert parse_choice("hook:*").members[0] == AddedBy("*")
    assert AddedBy("*").every and not AddedBy("lora").every
    assert str(parse_choice(["fc.*", "hook:lora"])) == "[fc.*, hook:lora]"
    assert str(parse_choice("fc.*")) == "fc.*"


def test_members_of_a_list_have_their_number_in_the_key_path() -> None:
    assert [where for where, _ in parse_choice(["fc", "h"]).placed("x.select")] == [
        "x.select.0",
        "x.select.1",
    ]
    assert [where for where, _ in parse_choice(["fc"]).placed("x")] == ["x.0"]
    assert [where for where, _ in parse_choice("fc").placed("x.select")] == ["x.select"]


def test_a_choice_parses_to_itself() -> None:
    choice = parse_choice(["fc", "hook:a"])
    assert parse_choice(choice) is choice


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "an empty list"),
        ("hook:", "expected hook:NAME"),
        (1.5, "quote it"),
        (["{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}"] * 4, "too large"),  # all members together
    ],
)
def test_empty_and_too_large_choices_are_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_choice(raw)

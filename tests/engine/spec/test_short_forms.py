"""A choice of parameters, which has a short form."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.engine.spec.parameters import AddedBy, parse_choice


def test_a_selector_a_hook_or_a_list() -> None:
    assert parse_choice("hook:lora").members == (AddedBy("lora"),)
    assert parse_choice("hook:*").members[0] == AddedBy("*")
    assert AddedBy("*").every
    assert not AddedBy("lora").every
    assert str(parse_choice(["fc.*", "hook:lora"])) == "[fc.*, hook:lora]"
    assert str(parse_choice("fc.*")) == "fc.*"
    # members of a list have their number in the key path
    for raw, places in ((["fc", "h"], ["x.0", "x.1"]), (["fc"], ["x.0"]), ("fc", ["x"])):
        assert [where for where, _ in parse_choice(raw).placed("x")] == places


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "an empty list"),
        ("hook:", "expected hook:NAME"),
        (1.5, "quote it"),
        (["{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}"] * 4, "too large"),  # all members together
    ],
)
def test_empty_choices_are_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_choice(raw)

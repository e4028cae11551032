"""`when` and `expect`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.spec.when import Range, When, parse_expect


@pytest.mark.parametrize(
    ("counts", "inside", "outside"),
    [
        (When(step={"start": 2, "end": 8, "every": 3}).step, (2, 5), (0, 1, 3, 8)),
        (When(step={"every": 10}).step, (0, 10, 20), (1, 9, 11)),
        (When(step={"end": 2}).step, (0, 1), (2, 3)),
        (When(step=[0, 5]).step, (0, 5), (1, 4)),
        (When(step=3).step, (3,), (0, 2, 4)),
        (parse_expect(3), (3,), (2, 4)),
        (parse_expect(">=1"), (1, 99), (0,)),
        (parse_expect("0..2"), (0, 2), (3,)),
        (parse_expect("<= 4"), (0, 4), (5,)),
        (parse_expect("2"), (2,), (1,)),
    ],
)
def test_steps_exclude_their_end_and_expectations_include_it(counts: Any, inside: Any, outside: Any) -> None:
    assert all(number in counts for number in inside)
    assert not any(number in counts for number in outside)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"step": {"start": 5, "end": 5}}, "never fires"),
        ({"step": "10:20"}, "a range is written {start: 0, end: 100, every: 10}"),
        ({"step": [-1]}, "expected a count from 0 on"),
        ({"step": True}, "expected a number"),
        ({"step": {"evry": 3}}, "Extra inputs"),
        ({"probability": 1.5}, "less than or equal to 1"),
        ({"mode": "training"}, "'train', 'eval' or 'any'"),
    ],
)
def test_an_impossible_schedule_is_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        When.model_validate(raw)


def test_an_unrestricted_schedule_is_recognised() -> None:
    assert When().always and When(seed=3).always
    assert not any(When(**raw).always for raw in ({"mode": "train"}, {"step": 0}, {"probability": 0.5}))


def test_a_schedule_is_shown_in_words() -> None:
    assert str(When()) == "always"
    shown = str(When(mode="eval", step=Range(start=1, end=9, every=2), call=0))
    assert shown == "eval, step 1:9 every 2, call 0"
    assert str(When(step={"every": 10}, probability=0.5)) == "step every 10, p=0.5"


@pytest.mark.parametrize("raw", ["3..1", "some", -1, 1.5, True, None, ">1"])
def test_other_expectations_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="found"):
        parse_expect(raw)

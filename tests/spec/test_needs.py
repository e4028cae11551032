"""`needs`: names of experiments that run first."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.spec.needs import MOST_NEEDS, MOST_OVERRIDES, MOST_TEXT, Need, Needs

NEEDS = TypeAdapter[dict[str, Need]](Needs)
GOOD = {"experiment": "folder/train"}


def test_a_need_is_shown_as_its_command() -> None:
    needs = NEEDS.validate_python({"base": GOOD | {"overrides": ["seed=1", "+hooks.x=y"]}})
    assert str(needs["base"]) == "experiment folder/train seed=1 +hooks.x=y"


@pytest.mark.parametrize(
    "raw",
    [
        {"previous": GOOD},
        {"1st": GOOD},
        {"a b": GOOD},
        {"a" * 101: GOOD},
        {"a": {"experiment": "../train"}},
        {"a": {"experiment": "train.yaml"}},
        {"a": {"experiment": "/train"}},
        {"a": {"experiment": ""}},
        {"a": GOOD | {"overrides": ["x" * (MOST_TEXT + 1)]}},
        {"a": GOOD | {"overrides": ["x"] * (MOST_OVERRIDES + 1)}},
        {"a": GOOD | {"override": []}},
        {f"n{number}": GOOD for number in range(MOST_NEEDS + 1)},
    ],
)
def test_a_wrong_name_and_too_many_are_refused(raw: Any) -> None:
    with pytest.raises(ValidationError):
        NEEDS.validate_python(raw)


def test_the_reserved_name_is_explained() -> None:
    with pytest.raises(ValidationError, match="previous is the run before"):
        NEEDS.validate_python({"previous": GOOD})

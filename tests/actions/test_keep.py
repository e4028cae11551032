"""`keep` takes exactly one way to choose samples."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.actions.capture import Capture


@pytest.mark.parametrize(
    "keep", [{}, {"every": 0}, {"every": 2, "reservoir": 3}, "all", {"first": 3}], ids=str
)
def test_a_choice_is_one_of_two(keep: Any) -> None:
    with pytest.raises(ValidationError):
        Capture(keep=keep)


@pytest.mark.parametrize(
    ("keep", "said"), [({"every": 2}, "every 2"), ({"reservoir": 9}, "reservoir 9")], ids=str
)
def test_its_text_names_the_choice(keep: Any, said: str) -> None:
    assert str(Capture(keep=keep).keep) == said

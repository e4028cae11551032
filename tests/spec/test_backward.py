"""`task.backward`: `class` goes with `score: class`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.spec.backward import BackwardPass


def test_a_score_selects_what_the_gradients_are_of() -> None:
    texts = {"label": "the logit of the label", "output": "the output", "loss": "the loss"}
    for score, text in texts.items():
        assert str(BackwardPass.model_validate({"score": score})) == text
    assert str(BackwardPass.model_validate({"score": "class", "class": 0})) == "the logit of class 0"


@pytest.mark.cases(
    "raw",
    [
        {"score": "class"},
        {"score": "top", "class": 0},
        {"score": "class", "class": -1},
        {"score": "class", "class": True},
        {"score": "clas"},
        {},
    ],
)
def test_class_without_score_class_or_the_reverse_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BackwardPass.model_validate(raw)

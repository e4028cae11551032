"""`task.sampling`: the distribution of the next token."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.spec.sampling import Sampling


def test_its_text_has_the_given_keys() -> None:
    assert str(Sampling()) == "temperature 1"
    assert str(Sampling(temperature=0.5, top_k=3, top_p=0.9)) == "temperature 0.5, top_k 3, top_p 0.9"


@pytest.mark.cases(
    "raw",
    [
        {"temperature": 0},
        {"temperature": float("nan")},
        {"temperature": 1001},
        {"top_k": 0},
        {"top_k": True},
        {"top_k": 1.0},
        {"top_p": 0},
        {"top_p": 1.1},
        {"topk": 3},
    ],
)
def test_other_distributions_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling.model_validate(raw)

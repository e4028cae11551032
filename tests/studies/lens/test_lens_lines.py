"""The lines of lens.jsonl: what may be there, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.studies.lens.records import MOST_TOP, LensLine


def test_a_line_is_accepted_with_keys_of_a_later_version() -> None:
    found = LensLine.model_validate(LINE | {"later": 1})
    assert found.part == "h.0"
    assert found.position == 3
    assert found.top == [(5, " a", 0.5)]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "neurons"},
        {"position": -1},
        {"token": -2},
        {"part": "p" * 1_001},
        {"top": [[0, None, 0.0]] * (MOST_TOP + 1)},
        {"top": [["5", " a", 0.5], [{}, "", ""]]},
    ],
)
def test_a_value_beyond_its_limits_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LensLine.model_validate(LINE | change)


LINE: dict[str, Any] = {
    "sample": 0, "split": "val", "part": "h.0", "kind": "residual", "layer": None, "position": 3, "token": -1,
    "text": None, "top": [[5, " a", 0.5]],
}  # fmt: skip

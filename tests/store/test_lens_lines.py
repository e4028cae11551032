"""Lines of lens.jsonl."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.store.lens_lines import LENS_LINE, MOST_TOP

LINE: dict[str, Any] = {
    "sample": 0, "split": "val", "part": "h.0", "kind": "residual", "layer": None, "position": 3, "token": -1,
    "text": None, "top": [[5, " a", 0.5]],
}  # fmt: skip


def test_a_line_has_a_part_a_position_and_the_predicted_tokens() -> None:
    found = LENS_LINE.validate_python(LINE | {"later": 1})
    assert (found.part, found.position, found.top) == ("h.0", 3, [(5, " a", 0.5)])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "neurons"},
        {"position": -1},
        {"token": -2},
        {"top": [[0, None, 0.0]] * (MOST_TOP + 1)},
        {"top": [["5", " a", 0.5]] * 2 + [[{}, "", ""]]},
        {"part": "p" * 1_001},
    ],
)
def test_invalid_lines_of_a_strangers_file_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LENS_LINE.validate_python(LINE | change)

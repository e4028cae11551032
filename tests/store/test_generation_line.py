"""Lines of generations.jsonl."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.store.generation_line import GENERATIONS_LINE

LINE: dict[str, Any] = {
    "sample": 0, "split": "val", "prompt": "a", "prompt_ids": [1], "text": None, "ids": [2, 3],
    "reason": "length", "next": [[2, " b", 0.5], [3, None, 0.25]],
}  # fmt: skip


def test_a_line_may_have_a_comparison() -> None:
    assert GENERATIONS_LINE.validate_python(LINE).next == [(2, " b", 0.5), (3, None, 0.25)]
    compared = {"text_without": "b", "ids_without": [2], "reason_without": "end", "kl_first": 0.1}
    assert GENERATIONS_LINE.validate_python(LINE | compared).kl_first == 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "stop"},
        {"ids": [-1]},
        {"ids": "23"},
        {"next": [[2, "b"]]},
        {"next": [[0, None, 0.0]] * 101},
        {"sample": True},
        {"prompt": "a" * (2**20 + 1)},
    ],
)
def test_invalid_lines_of_a_strangers_file_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GENERATIONS_LINE.validate_python(LINE | change)

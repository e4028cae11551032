"""The lines of generations.jsonl: what may be there, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hookrun.studies.generate.records import GenerationLine


def test_a_line_may_lack_the_other_continuation() -> None:
    assert GenerationLine.model_validate(LINE).next == [(2, " b", 0.5), (3, None, 0.25)]
    other = {"text_without": "b", "ids_without": [2], "reason_without": "end", "kl_first": 0.1}
    assert GenerationLine.model_validate(LINE | other).kl_first == 0.1


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
def test_a_value_beyond_its_limits_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerationLine.model_validate(LINE | change)


LINE: dict[str, Any] = {
    "sample": 0, "split": "val", "prompt": "a", "prompt_ids": [1], "text": None, "ids": [2, 3],
    "reason": "length", "next": [[2, " b", 0.5], [3, None, 0.25]],
}  # fmt: skip

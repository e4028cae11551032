"""Helpers of the error messages."""

from __future__ import annotations

from hookrun.errors import reason


def test_a_reason_is_one_line() -> None:
    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError()) == "ValueError"

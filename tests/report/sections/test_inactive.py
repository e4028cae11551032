"""Hooks that matched and did nothing."""

from __future__ import annotations

from pathlib import Path


def test_a_hook_that_never_fired_is_shown_first(observed: Path, page) -> None:
    found = page(observed)
    assert "1 hook matched but did nothing late never fired on fc" in found.text
    assert found.source.index("matched but did nothing") < found.source.index('id="summary"')

"""Hooks in a user's own loop on two ranks: right in either order of hooks and wrapper, or refused."""

from __future__ import annotations

import json
from pathlib import Path

LOOP = Path(__file__).with_name("own_loop.py")


def test_hooks_under_a_wrapper_see_reduced_gradients(free_port, warm, tmp_path) -> None:
    port = free_port()
    files = [tmp_path / "0", tmp_path / "1"]
    with files[0].open("w") as one, files[1].open("w") as two:
        pair = [
            warm.start(LOOP.read_text(), rank, port, stdout=file, stderr=2)
            for rank, file in enumerate((one, two))
        ]
        assert [each.wait() for each in pair] == [0, 0]
    found, other = (json.loads(each.read_text()) for each in files)
    assert found == other
    refused = {name: found.pop(name) for name in list(found) if isinstance(found[name], str)}
    assert len(found) == 15, "each order of hooks and wrapper"
    assert max(found.values()) < 1e-6
    assert "not summed over the ranks under no_sync()" in refused["grad under no_sync"]
    assert "not summed over the ranks under set_requires_gradient_sync(False)" in refused["grad without sync"]
    assert "the parameter 0.weight was replaced after hooks were installed" in refused["replaced"]
    assert "does not sum its gradient over the ranks" in refused["added to a wrapped model"]

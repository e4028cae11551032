"""The results of the parts of an analysis are saved during the analysis, and are not computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookrun.tasks.loop import cka, results
from hookrun.tasks.loop.cka import Way, linear_cka_of_all
from hookrun.tasks.loop.features import Features
from hookrun.tasks.loop.results import Results


class Killed(BaseException):
    """Raised where the process is killed."""


def killing(saved: list[dict[str, Any]], after: int) -> Callable[[dict[str, Any]], None]:
    """Saves, and kills the process after so many states."""

    def save(found: dict[str, Any]) -> None:
        saved.append(copy.deepcopy(found))
        if len(saved) == after:
            raise Killed

    return save


def test_a_comparison_is_resumed_at_the_next_row_of_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "SECONDS", 0.0)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(50, width, generator=generator) for width in (3, 8, 5)]
    features = [Features(str(number), each, block_bytes=2**20) for number, each in enumerate(rows)]
    way = Way(by_features=False, tile=16, needed=0)
    expected = linear_cka_of_all(features, way)
    computed, real = list[int](), cka.gram
    monkeypatch.setattr(cka, "gram", lambda *args: computed.append(0) or real(*args))
    states = list[dict[str, Any]]()
    assert torch.equal(linear_cka_of_all(features, way, Results(save=killing(states, 0))), expected)
    whole = len(computed)
    assert len(states) == 5, "four rows of tiles, and the products"
    for after in range(1, 6):
        states = []
        with pytest.raises(Killed):
            linear_cka_of_all(features, way, Results(save=killing(states, after)))
        computed.clear()
        assert torch.equal(linear_cka_of_all(features, way, Results(states[-1])), expected)
        assert len(computed) < whole - 3 * after
    assert not computed, "the products were there"


def test_states_that_take_long_to_save_are_saved_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])

    def saves(cost: float) -> int:
        count = [0]

        def save(found: dict[str, Any]) -> None:
            count[0] += 1
            now[0] += cost

        made = Results(save=save)
        for number in range(100):
            now[0] += 1.0
            made.add(str(number), number)
        return count[0]

    assert saves(0.01) == 100
    assert saves(2.0) == 5
    made = Results({"a": 1}, save=lambda found: pytest.fail("not due"))
    made.add("b", 2, is_whole=False)
    assert (made.get("a"), made.get("b"), made.get("c")) == (1, 2, None)

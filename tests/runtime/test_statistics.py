"""A record of statistics is complete after `measure` at the latest, with and without the compiled function."""

from __future__ import annotations

import pytest
import torch

from hookrun.actions.base import RECORD_KEYS
from hookrun.kernels import statistics
from hookrun.runtime.statistics import Statistics

START = ("s", "0", "", "stats", "train", 0, 0, 0)


def test_a_record_is_the_same_with_and_without_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(statistics, "_kernel", lambda: None)
        made = Statistics()
        waiting = made.add(x := torch.tensor([1.0, 3.0]), ("mean", "max"), START)
        x.zero_()
        made.measure()
        assert waiting is not None, compiled
        assert waiting[0] == {**dict(zip(RECORD_KEYS, START, strict=True)), "mean": 2.0, "max": 3.0}, compiled

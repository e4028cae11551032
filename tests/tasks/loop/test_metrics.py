"""Metrics by name: which there are, what they log, and their better direction."""

from __future__ import annotations

import math

import pytest

from hookrun.errors import SpecError
from hookrun.tasks.loop.metrics import DEFAULT, METRICS, load_metrics


def test_metrics_are_loaded_in_the_given_order_or_by_default() -> None:
    assert load_metrics(None) == DEFAULT
    assert [each.name for each in load_metrics(["rank", "loss"])] == ["rank", "loss"]
    with pytest.raises(SpecError, match="did you mean 'rank'"):
        load_metrics(["ramk"])


def test_a_perplexity_beyond_the_largest_number_is_infinite() -> None:
    shown = METRICS["perplexity"].shown
    assert shown(1.0) == pytest.approx(math.e) and shown(1e4) == math.inf
    assert math.isnan(shown(math.nan))

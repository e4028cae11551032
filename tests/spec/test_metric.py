"""`task.metrics`: one name, or a list of names and mappings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.spec.metric import MOST_METRICS, MetricKeys, Metrics, asked

METRICS = TypeAdapter[tuple[MetricKeys, ...] | None](Metrics)


def test_one_metric_is_a_list_of_one_and_none_is_the_default() -> None:
    assert METRICS.validate_python("loss") == (MetricKeys(name="loss"),)
    assert METRICS.validate_python({"name": "loss"}) == (MetricKeys(name="loss"),)
    assert METRICS.validate_python(None) is None


def test_metrics_are_serialized_in_their_shortest_form() -> None:
    raw = ["loss", {"name": "kl", "by": "sample", "against": {"run": "base"}}]
    assert METRICS.dump_python(METRICS.validate_python(raw)) == tuple(raw)


def test_whether_a_metric_is_listed() -> None:
    metrics = METRICS.validate_python(["loss", {"name": "kl"}])
    assert asked(metrics, "kl") and not asked(metrics, "accuracy") and not asked(None, "loss")


@pytest.mark.parametrize(
    "raw", [[], "", {}, 3, [{"name": "kl", "by": "row"}], [{"nam": "kl"}], ["a"] * (MOST_METRICS + 1)]
)
def test_other_values_are_refused(raw: Any) -> None:
    with pytest.raises(ValidationError):
        METRICS.validate_python(raw)

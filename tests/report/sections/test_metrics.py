"""The curves of metrics.jsonl, and the latest value of each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hookrun.report.facts import Facts
from hookrun.report.lines import SampledLines
from hookrun.report.sections.metrics import SECTION, LatestValue, latest


def facts(*lines: dict[str, Any]) -> Facts:
    return Facts(Path(), {}, metrics=SampledLines(list(lines)))


def line(step: int, of: str = "epoch", split: str = "val", **values: float) -> dict[str, Any]:
    return {"split": split, "of": of, "step": step, **values}


def test_each_metric_is_one_chart_and_single_batches_are_named() -> None:
    found = SECTION.build(
        facts(
            *(line(step, "batch", "train", loss=1.0 / step, lr=0.1) for step in (1, 2)),
            *(line(step, split=split, loss=0.5) for step in (2, 4) for split in ("train", "val")),
            line(4, accuracy=0.5),
        )
    )
    assert found is not None
    assert [figure.title for figure in found] == ["loss"], "a constant lr and a single value are not drawn"
    assert found[0].legend == ("train, single batches", "train", "val")


def test_the_latest_and_the_best_of_means_before_those_of_batches() -> None:
    lines = [line(1, loss=0.5, accuracy=0.9), line(2, loss=0.7, accuracy=0.8)]
    lines += [line(3, "batch", loss=0.1), line(3, "batch", "train", loss=0.2, lr=0.1)]
    assert latest(facts(*lines)) == [
        LatestValue("val", "loss", 0.7, 0.5, False),
        LatestValue("val", "accuracy", 0.8, 0.9, False),
        LatestValue("train", "loss", 0.2, 0.2, True),
    ]


def test_a_nan_can_be_the_latest_value_and_never_the_best() -> None:
    (found,) = latest(facts(line(1, loss=0.5), line(2, loss=math.nan)))
    assert math.isnan(found.last) and found.best == 0.5


def test_lines_without_a_step_are_of_analyses() -> None:
    assert SECTION.build(facts({"module": "fc", "accuracy": 0.5})) is None

"""Metrics against the swept keys."""

from __future__ import annotations

import json
import re
from pathlib import Path

from report_pages import table

from hookrun.report import write_report


def test_repetitions_are_one_curve_with_a_band(sweep: Path, page) -> None:
    source = page(sweep).source
    assert "<span>val/accuracy against train.optimizer.lr</span>" in source and 'class="band c0"' in source
    assert "against seed" not in source


def test_one_key_is_a_curve_two_are_a_map_and_three_a_curve_each(copied: Path, page) -> None:
    def with_keys(*keys: str) -> str:
        for job in range(6):
            values = [f"{key}={(job // 2**place) % 2 + 1}" for place, key in enumerate(keys)]
            (copied / f"{job}/.hydra/overrides.yaml").write_text(json.dumps(values))
        write_report(copied)
        return str(page(copied).source)

    assert "val/accuracy against a<" in with_keys("a")
    two = with_keys("a", "b")
    assert "<span>val/accuracy</span>" in two and "across: a; down: b" in two
    three = with_keys("a", "b", "c")
    assert all(f"val/accuracy against {key}<" in three for key in "abc")


def test_the_cells_of_a_map_are_means(copied: Path, page) -> None:
    for job in range(6):
        (copied / f"{job}/.hydra/overrides.yaml").write_text(
            json.dumps([f"a={job % 2}", f"b={job % 2}", f"seed={job}"])
        )
    write_report(copied)
    section = page(copied).source.split("<span>val/accuracy</span>")[1].split("</figure>")[0]
    found = [[float(row["val/accuracy"]) for row in table(copied)[start::2]] for start in (0, 1)]
    first, second = (f"{sum(some) / 3:.3g}" for some in found)
    assert re.findall(r'class="on-\w+">([\w.]*)<', section) == [first, "", "", second]


def test_a_job_whose_metric_is_nan_is_counted_and_the_curve_continues(copied: Path, page) -> None:
    for line in (copied / "0/metrics.jsonl", copied / "1/metrics.jsonl"):
        with line.open("a") as file:
            file.write('{"split": "val", "epoch": 9, "step": 99, "loss": "NaN", "accuracy": 0.1}\n')
    write_report(copied)
    section = (
        page(copied).source.split("<span>val/loss against train.optimizer.lr</span>")[1].split("</figure>")[0]
    )
    assert "left out: 2 jobs whose value is not finite" in section
    assert re.search(r'class="line c0" d="M[\d.]+ [\d.]+L', section)
    assert [row["val/loss"] for row in table(copied)][:2] == ["nan", "nan"]


def test_the_navigation_has_the_words_of_the_heading(sweep: Path, page) -> None:
    source = page(sweep).source
    assert '<h2 id="figures">Metrics by swept key</h2>' in source
    assert '<a href="#figures">Metrics by swept key</a>' in source

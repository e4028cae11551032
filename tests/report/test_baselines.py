"""Jobs without hooks, and the difference of the others from them."""

from __future__ import annotations

import shutil
from pathlib import Path

from report_pages import SHORT, table

from hookrun.cli import main
from hookrun.report import write_report


def test_baselines_come_first_and_each_job_is_compared_with_its_own(folder: Path, page) -> None:
    """One sweep: its title, its order, its differences, and its progress while it runs."""
    keys = (*SHORT, "+hooks.loud={select: fc, hook: forward, action: scale, factor: -1}")
    assert main([*keys, "baseline=true", "seed=0,1", "hydra.sweep.dir=compared"]) == 0
    path = folder / "compared"
    rows = {row["job"]: row for row in table(path)}
    assert list(rows) == ["0", "1", "2", "3"]
    for job, baseline in (("2", "0"), ("3", "1")):
        expected = float(rows[job]["objective"]) - float(rows[baseline]["objective"])
        assert float(rows[job]["val/accuracy - baseline"]) == expected
        assert rows[baseline]["val/accuracy - baseline"] == ""
    found = page(path)
    assert "<h1>train mlp over seed</h1>" in found.source
    first = [link for link in found.links if link.startswith("./")][:2]
    assert first == ["./0/report.html", "./1/report.html"] and found.text.count(" baseline ") >= 2
    assert 'id="best"' in found.source and "without hooks: " in found.text
    shutil.rmtree(path / "3")
    write_report(path)
    assert "3 of 4 jobs finished" in page(path).text


def test_metrics_that_only_the_baselines_have_are_not_drawn(folder: Path, page) -> None:
    hook = "+hooks.c={select: fc, hook: forward, action: check, max: 1e-4}"
    keys = ["-m", "task=evaluate", *SHORT[1:4], hook, "seed=0,1", "baseline=true", "hydra.sweep.dir=ends"]
    assert main(keys) == 3
    assert "failed 2" in page(folder / "ends").text or "stopped 2" in page(folder / "ends").text

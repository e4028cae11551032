"""The content of a sweep's directory for its page."""

from __future__ import annotations

import shutil
from pathlib import Path

from report_pages import SHORT, table

from hookrun.cli import main
from hookrun.report import write_report
from hookrun.report.jobs import find_jobs
from hookrun.report.sweep_facts import swept_keys


def test_keys_with_one_value_were_not_swept(sweep: Path) -> None:
    assert swept_keys(find_jobs(sweep)) == ["train.optimizer.lr", "seed"]


def test_a_sweep_that_has_just_begun_has_its_keys_and_its_number_of_jobs(copied: Path, page) -> None:
    for job in range(1, 6):
        shutil.rmtree(copied / str(job))
    write_report(copied)
    text = page(copied).text
    assert "not started 5" in text and "5 jobs not finished" in text
    assert [(row["train.optimizer.lr"], row["seed"]) for row in table(copied)] == [("0.001", "0")]
    (copied / "sweep.json").unlink()  # as written by an earlier version
    write_report(copied)
    assert "not started 5" in page(copied).text
    (copied / "multirun.yaml").write_text("hydra: [half")
    write_report(copied)
    assert "not finished" not in page(copied).text


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

"""The page and the table of a sweep, from its directory alone, with jobs in any state."""

from __future__ import annotations

import json
from pathlib import Path

from report_pages import SHORT, table

import hookrun
from hookrun.cli import main
from hookrun.report import write_report


def test_it_is_made_at_the_end_of_a_multirun(sweep: Path, page) -> None:
    found = page(sweep)
    assert "done 6" in found.text and "val/accuracy" in found.text
    assert all((sweep / str(job) / "report.html").is_file() for job in range(6))


def test_the_table_holds_every_job_with_its_keys_and_latest_metrics(sweep: Path) -> None:
    rows = table(sweep)
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [(row["train.optimizer.lr"], row["seed"]) for row in rows[:3]] == [
        ("0.001", "0"),
        ("0.001", "1"),
        ("0.01", "0"),
    ]
    for row in rows:
        last = hookrun.open_run(sweep / row["job"]).metrics[-1]
        assert (float(row["val/accuracy"]), float(row["val/loss"])) == (last["accuracy"], last["loss"])
        assert (row["status"], row["exit_code"], row["reason"]) == ("done", "0", "")
        assert float(row["seconds"]) > 0


def test_the_training_loss_is_the_mean_of_the_last_epoch(sweep: Path) -> None:
    for row in table(sweep):
        (mean,) = [
            line["loss"]
            for line in hookrun.open_run(sweep / row["job"]).metrics
            if (line["split"], line["of"]) == ("train", "epoch")
        ]
        assert float(row["train/loss"]) == mean


def test_names_in_a_sweep_are_escaped(copied: Path, page) -> None:
    evil = "<script>alert(1)</script>"
    (copied / "0/.hydra/overrides.yaml").write_text(json.dumps([f"{evil}={evil}"]))
    (copied / "1/status.json").write_text(json.dumps({"status": "failed", "reason": evil}))
    (copied / "2").rename(copied / '"><img src=x>')
    write_report(copied)
    found = page(copied)
    assert found.tags.count("script") == 1
    assert evil in found.text and "x" not in found.links


def test_the_page_of_an_interrupted_sweep(folder: Path, page, monkeypatch) -> None:
    from hookrun import tasks

    ran = tasks.run
    seen = []

    def interrupted(prepared, path, **options):
        seen.append(path)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return ran(prepared, path, **options)

    monkeypatch.setattr(tasks, "run", interrupted)
    assert main([*SHORT, "hydra.sweep.dir=cut", "seed=1,2,3"]) == 130
    assert "done 1" in page(folder / "cut").text

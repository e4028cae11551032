"""The message about a sweep that a signal ended."""

from __future__ import annotations

from pathlib import Path

from hookrun.cli.interrupted import interrupted
from hookrun.store.run_dir import RunDir

JOBS = [[f"seed={seed}", "train.epochs=3"] for seed in (5, 6, 7, 8)]


def run(sweep: Path, name: str, status: str) -> None:
    made = RunDir.create(sweep / name)
    made.set_status(status)
    made.close()


def test_the_message_has_the_statuses_of_jobs_and_names_those_not_started(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    assert interrupted(KeyboardInterrupt(), sweep, None) == f"sweep: interrupted: no job started, in {sweep}"
    (sweep).mkdir()
    (sweep / "multirun.yaml").touch()
    run(sweep, "0", "done")
    run(sweep, "2", "interrupted")
    said = interrupted(KeyboardInterrupt("by SIGTERM"), sweep, JOBS)
    first, second = said.splitlines()
    assert first.startswith("sweep: by SIGTERM: ") and first.endswith(f", in {sweep}")
    assert "1 done" in first and "1 interrupted" in first and "2 not started" in first
    assert second == "  not started: #1 (seed=6), #3 (seed=8)", "what all jobs share is not repeated"
    named = interrupted(KeyboardInterrupt(), sweep, JOBS[:2], {0: "0", 1: "7"})
    assert "1 not started" in named and named.endswith("not started: #1 (seed=6)")

"""The page of a run: made from the run's directory alone."""

from __future__ import annotations

from pathlib import Path

import hookrun
from hookrun.actions.base import RECORD_KEYS
from hookrun.cli import main
from hookrun.store.files import StoreError


def test_it_is_written_at_the_end_of_a_run_and_its_path_is_printed(run, page, capsys) -> None:
    path = run("task=evaluate", "train.limit_batches=1")
    assert f"report: {path}/report.html" in capsys.readouterr().out
    assert "evaluate" in page(path).text and "done" in page(path).text


def test_it_shows_the_experiment_and_the_versions(observed: Path, page) -> None:
    text, found = page(observed).text, hookrun.open_run(observed)
    for said in ["task train", "model mlp ", "data digits", "seed 0", "exit code 0", found.env["torch"]]:
        assert said in text
    assert found.plan["hash"][:12] in text
    last = found.metrics[-1]
    assert f"val accuracy {last['accuracy']:.4g}" in text and f"val loss {last['loss']:.4g}" in text


# ---- how runs end


def test_a_page_that_cannot_be_written_does_not_fail_the_run(run, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot write report.html: No space left on device")

    monkeypatch.setattr("hookrun.report.run.write_page", refuse)
    path = run("task=evaluate", "train.limit_batches=1")
    said = capsys.readouterr().err
    assert "report: not made: cannot write report.html: No space left on device" in said
    assert f"python -m hookrun.report {path}" in said
    assert hookrun.open_run(path).status["status"] == "done"


def test_a_refused_directory_keeps_the_page_it_has(run, observed: Path) -> None:
    before = (observed / "report.html").stat().st_mtime_ns
    assert main(["model=mlp", f"hydra.run.dir={observed}"]) == 2
    assert (observed / "report.html").stat().st_mtime_ns == before


# ---- again


def test_every_record_begins_with_the_same_keys(observed: Path) -> None:
    records = hookrun.open_run(observed).stats
    assert {tuple(record)[: len(RECORD_KEYS)] for record in records} == {RECORD_KEYS}

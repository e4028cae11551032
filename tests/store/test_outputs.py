"""The last run in a folder to end, and whether it is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir, newest_finished, newest_unchanged, outputs_folder


def finished(folder: Path, name: str, ended: str) -> Path:
    run = RunDir.create(folder / name)
    run.set_status("running")
    run.log_metrics(step=1)
    run.close()
    run.write_manifest()
    run.set_status("done")
    status = run.path / "status.json"
    text = status.read_text()
    before = text.split('"ended": "')[1].split('"')[0]
    status.write_text(text.replace(f'"ended": "{before}"', f'"ended": "{ended}"'))
    return run.path


def test_the_environment_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path / "x/.."))
    assert outputs_folder() == tmp_path / "outputs"
    monkeypatch.delenv("HOOKRUN_OUTPUT")
    monkeypatch.chdir(tmp_path)
    assert outputs_folder() == tmp_path / "outputs"


def test_the_run_that_ended_last_is_found_without_links_and_unfinished_runs(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no finished run in"):
        newest_finished(tmp_path)
    long = finished(tmp_path, "a", "2030-01-02")
    finished(tmp_path, "b", "2030-01-01")
    RunDir.create(tmp_path / "c").set_status("running")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/status.json").write_text("{")
    elsewhere = finished(tmp_path / "elsewhere", "e", "2030-01-03")
    (tmp_path / "e").symlink_to(elsewhere)
    assert newest_finished(tmp_path) == long


def test_a_run_whose_files_were_changed_is_skipped(tmp_path: Path) -> None:
    older, newer = finished(tmp_path, "a", "2030-01-01"), finished(tmp_path, "b", "2030-01-02")
    assert newest_unchanged(tmp_path) == newer
    (newer / "metrics.jsonl").write_text("{}\n")
    assert newest_unchanged(tmp_path) == older
    (older / "manifest.json").unlink()
    assert newest_unchanged(tmp_path) is None

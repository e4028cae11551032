"""A run directory has one writer at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hookrun.store.files import StoreError
from hookrun.store.lock import LockedError, locked, refuse_held, sole_writer


def test_a_second_writer_is_refused_with_the_first_s_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with sole_writer(run):
        (run / "file").write_text("")
        with (
            pytest.raises(LockedError, match=rf"run is being written by process {os.getpid()} on "),
            sole_writer(run),
        ):
            pass
        with pytest.raises(LockedError):
            refuse_held(run)
    refuse_held(run)
    assert [path.name for path in run.iterdir()] == ["file"], "the lock is removed at the end"


def test_a_folder_inside_is_locked_too_except_for_the_writer_itself(tmp_path: Path) -> None:
    sweep, job = tmp_path / "sweep", tmp_path / "sweep/0"
    with sole_writer(sweep):
        with pytest.raises(LockedError), sole_writer(job):
            pass
        assert not job.exists()
        with sole_writer(job, within=sweep):
            assert job.is_dir()


def test_a_folder_created_for_the_lock_is_removed_if_it_stays_empty(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with sole_writer(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


def test_a_leftover_lock_file_does_not_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on host")
    refuse_held(tmp_path)
    with sole_writer(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()}")


def test_a_link_in_its_place_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(tmp_path / "own")
    with pytest.raises(StoreError, match="cannot open"), sole_writer(tmp_path / "run"):
        pass
    assert (tmp_path / "own").read_text() == "mine"


def test_waiting_for_a_lock_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    waited, flock = list[str](), fcntl.flock

    def first_end(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_EX:  # the wait: the first holder ends in the meantime
            first.__exit__(None, None, None)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", first_end)
    first = locked(tmp_path, lambda: waited.append("first"))
    first.__enter__()
    with locked(tmp_path, lambda: waited.append("second")), pytest.raises(LockedError):
        refuse_held(tmp_path)
    assert waited == ["second"]

"""A run directory has one writer at a time."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from hookrun.store.lock import LockedError, locked, refuse_held, sole_writer


def test_a_second_writer_is_refused_with_the_first_s_process(tmp_path) -> None:
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


def test_a_folder_inside_is_locked_too_except_for_the_writer_itself(tmp_path) -> None:
    sweep, job = tmp_path / "sweep", tmp_path / "sweep/0"
    with sole_writer(sweep):
        with pytest.raises(LockedError), sole_writer(job):
            pass
        assert not job.exists()
        with sole_writer(job, within=sweep):
            assert job.is_dir()


def test_waiting_for_a_lock_is_reported_once(tmp_path) -> None:
    waited, is_held, may_end = list[str](), threading.Event(), threading.Event()

    def first() -> None:
        with locked(tmp_path, lambda: waited.append("first")):
            is_held.set()
            may_end.wait()

    def told() -> None:
        waited.append("second")
        may_end.set()

    holder = threading.Thread(target=first)
    holder.start()
    is_held.wait()
    with locked(tmp_path, told), pytest.raises(LockedError):
        refuse_held(tmp_path)
    holder.join()
    assert waited == ["second"]


def test_a_file_system_without_locks_does_not_keep_writers_apart(tmp_path, monkeypatch) -> None:
    import fcntl

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with sole_writer(tmp_path), locked(tmp_path, lambda: None):
        refuse_held(tmp_path)

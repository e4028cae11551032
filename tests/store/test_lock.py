"""A run directory has one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hookrun.store import lock
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


def test_a_folder_inside_is_locked_too(tmp_path) -> None:
    sweep = tmp_path / "sweep"
    job = tmp_path / "sweep/0"
    with sole_writer(sweep):
        with pytest.raises(LockedError), sole_writer(job):
            pass
        assert not job.exists()
        with sole_writer(job, within=sweep):
            assert job.is_dir()


def test_waiting_for_a_lock_is_reported_once(tmp_path) -> None:
    waiting_for_a_lock(tmp_path)


def waiting_for_a_lock(tmp_path: Path) -> None:
    """One thread holds a lock until another one waits for it, which then has it."""
    waited = list[str]()
    is_held = threading.Event()
    may_end = threading.Event()

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


NO_LOCKS = """
import errno, fcntl, os, socket, sys

def refuse(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = refuse
from hookrun.store import lock

lock.LEASE_SECONDS, lock.RENEWAL_SECONDS = 0.5, 0.05
"""
HOLDER = """
from pathlib import Path

if sys.argv[2]:
    socket.gethostname = lambda: sys.argv[2]
with lock.sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
print("left", flush=True)
"""


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, on which a lock that was not renewed for half a second may be taken over."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "RENEWAL_SECONDS", 0.05)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process, on a host of a name or on this one, that holds ``tmp_path / "run"`` without locks."""
    with ExitStack() as stack:

        def hold(host: str = "") -> subprocess.Popen[str]:
            command = [sys.executable, "-c", NO_LOCKS + HOLDER, str(tmp_path / "run"), host]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            return process

        yield hold


def test_a_second_writer_is_refused_without_system_locks(no_locks, held, tmp_path) -> None:
    holder = held()
    by = rf"run is being written by process {holder.pid} on .* not renewed for 0.5 seconds"
    with pytest.raises(LockedError, match=by), sole_writer(tmp_path / "run"):
        pass
    with pytest.raises(LockedError, match=by), sole_writer(tmp_path / "run/inside"):
        pass
    holder.communicate("")
    with sole_writer(tmp_path / "run"):
        (tmp_path / "run/file").write_text("")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_the_lease_of_a_process_killed_here_ends_at_once(no_locks, held, tmp_path, monkeypatch) -> None:
    holder = held()
    holder.kill()
    holder.wait()
    assert (tmp_path / "run/.lease").exists()
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1e6)
    with sole_writer(tmp_path / "run"):
        pass
    assert not (tmp_path / "run/.lease").exists()


def test_the_lease_of_another_host_ends_unrenewed(no_locks, held, tmp_path, capsys) -> None:
    holder = held("elsewhere")
    with (
        pytest.raises(LockedError, match=f"process {holder.pid} on elsewhere"),
        sole_writer(tmp_path / "run"),
    ):
        pass
    assert f"process {holder.pid} on elsewhere" in capsys.readouterr().out, "it says why it waits"
    holder.send_signal(signal.SIGSTOP)
    with sole_writer(tmp_path / "run"):
        refuse_held(tmp_path)
        holder.send_signal(signal.SIGCONT)
        holder.wait()  # it finds out by itself
    out, err = holder.communicate()
    assert holder.returncode == 1
    assert "left" not in out
    assert f"another process has taken over {tmp_path / 'run'}" in err


def test_two_writers_wait_without_system_locks(no_locks, tmp_path) -> None:
    waiting_for_a_lock(tmp_path)

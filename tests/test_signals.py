"""Signals: the exception that is raised, the time at which it is raised, and the restored handlers."""

from __future__ import annotations

import errno
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from hookrun import signals as interruptions
from hookrun.signals import (
    SIGNALS,
    Interrupted,
    code_of,
    handled,
    ignore_next,
    interruption_kept,
    listening,
    pending,
    shielded,
)
from hookrun.terminal import Words

raised = signal.raise_signal
TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP
USR1 = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _default_dispositions() -> Iterator[None]:
    """The signal dispositions of a process that was not started in the background."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, interruptions.DEFAULTS[number])
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    now = 1000.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.monotonic", lambda: now)
    return pause


def test_outside_of_a_loop_each_signal_is_raised_at_once() -> None:
    for number, code in ((INT, 130), (TERM, 143), (HUP, 129), (USR1, 138)):
        with pytest.raises(KeyboardInterrupt) as caught, handled():
            raised(number)
        error = caught.value
        assert isinstance(error, Interrupted)
        assert error.signum == number
        assert error.exit_code == code
        assert str(error) == f"interrupted by {error.name}"
        again = pickle.loads(pickle.dumps(error))
        assert again.exit_code == code
        assert str(again) == str(error)
        for each in SIGNALS:
            assert signal.getsignal(each) is interruptions.DEFAULTS[each]
        assert pending() is None
    assert code_of(KeyboardInterrupt()) == 130


def test_a_loop_raises_the_second_signal(pause, capfd) -> None:
    done = []
    with pytest.raises(Interrupted, match="SIGTERM"), handled(), listening():
        assert pending() is None
        raised(TERM)
        pause(0.01)
        raised(TERM)  # the same one, sent to the process and to its group
        signal_that_came = pending()
        assert signal_that_came is not None
        assert signal_that_came.name == "SIGTERM"
        assert "SIGTERM: the run ends after this step" in capfd.readouterr().err
        done.append("step")
        pause(0.5)
        raised(INT)  # the exit code is that of the first
        done.append("another step")
    assert done == ["step"]


def test_a_failed_run_ignores_the_next_signal_only(pause: Callable[[float], None]) -> None:
    done = []
    with pytest.raises(Interrupted, match="SIGINT"), handled():
        ignore_next()
        raised(TERM)
        pause(0.01)
        raised(TERM)  # torchrun may send it twice
        done.append("page")
        pause(0.5)
        raised(INT)
    assert done == ["page"]


def test_an_error_in_a_cleanup_does_not_replace_the_signal() -> None:
    error = AttributeError("no attribute 'save_nargs'")
    for around in (handled, interruption_kept):
        with pytest.raises(Interrupted, match="SIGTERM") as caught, handled(), around():
            try:
                raised(TERM)
            finally:
                raise error
        assert caught.value.__cause__ is error


def test_an_error_raised_in_its_place_keeps_the_signal() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), handled():
        with suppress(KeyboardInterrupt):
            raised(TERM)
        raise ValueError("Error building a validator: interrupted by SIGTERM")


def test_without_a_signal_every_error_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), handled(), interruption_kept():
        raise ValueError("mine")
    with pytest.raises(ValueError, match="mine"), handled(), listening(), interruption_kept():
        raised(TERM)  # it is only noted
        raise ValueError("mine")


def test_a_noted_signal_is_raised_at_the_end_of_the_loop() -> None:
    done = []
    with handled():
        with pytest.raises(Interrupted, match="SIGHUP"):
            with listening():
                with listening():
                    raised(HUP)
                done.append("the inner loop")
            done.append("the outer loop")
        assert done == ["the inner loop"]


def test_an_exception_of_the_loop_replaces_the_signal() -> None:
    with handled():
        with pytest.raises(ZeroDivisionError), listening():
            raised(USR1)
            raise ZeroDivisionError  # an error in the step takes precedence
        with shielded():
            pass
        assert pending() is not None, "and a sweep starts no further job"


def test_a_shielded_block_is_not_interrupted(pause: Callable[[float], None]) -> None:
    written = []
    with handled():
        with pytest.raises(Interrupted, match="SIGTERM"), shielded(), shielded():
            for _ in range(5):
                raised(TERM)
                pause(2)
            written.append("all of it")
        with pytest.raises(Interrupted, match="SIGTERM"):
            raised(INT)
    assert written == ["all of it"]


def test_each_signal_after_the_second_is_raised_at_once_too(pause: Callable[[float], None]) -> None:
    with handled():
        for _ in range(4):
            with pytest.raises(Interrupted):
                raised(INT)
            pause(0.2)


def test_a_signal_handled_elsewhere_is_not_taken_over() -> None:
    seen = list[int]()
    signal.signal(HUP, signal.SIG_IGN)  # nohup
    signal.signal(USR1, lambda number, _: seen.append(number))
    with handled():
        raised(HUP)
        raised(USR1)
        assert pending() is None
    assert seen == [USR1]
    assert signal.getsignal(HUP) is signal.SIG_IGN


def test_other_threads_set_no_handlers() -> None:
    found = list[object]()

    def work() -> None:
        with handled(), listening(), shielded():
            found.append(signal.getsignal(TERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_forked_child_does_not_handle_signals_of_its_parent() -> None:
    with handled():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for number in (INT, HUP, USR1):
                    raised(number)
                code = 0 if pending() is None else 2
                raised(TERM)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM


WORKER = """
import os, signal, sys
from multiprocessing import get_context
from hookrun.signals import left_to_main

def work(reader, writer):
    left_to_main(0)
    writer.send("ready")
    while True:
        writer.send(reader.recv())

if __name__ == "__main__":
    context = get_context(sys.argv[1])
    (there, to_worker), (from_worker, back) = context.Pipe(False), context.Pipe(False)
    worker = context.Process(target=work, args=(there, back), daemon=True)
    worker.start()
    assert from_worker.recv() == "ready"
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM"):
        os.system(f"kill -{name[3:]} {worker.pid}")  # from a process that is not its parent
        to_worker.send(name)
        assert from_worker.poll(20) and from_worker.recv() == name, name
    for _ in range(100):  # the first one is lost while the SIGTERM of before still waits
        worker.terminate()
        worker.join(0.2)
        if worker.exitcode is not None:
            break
    print(worker.exitcode)
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system does not say who sent a signal")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_continues_until_its_parent_ends_it(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WORKER)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", method],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "0\n"
    assert done.stderr == ""


def test_unread_output_does_not_keep_a_signalled_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookrun.terminal.UNREAD", 0)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, bytes(2**16))
    os.set_blocking(write, True)
    ended = pytest.raises(Interrupted, match="SIGTERM")
    with open(write, "w") as unread, redirect_stdout(unread), ended, handled(), listening():
        raised(TERM)
        print("a line that the pipe has no room for", flush=True)
    os.close(read)


class Gone(io.StringIO):
    """A terminal that was closed."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self.fileno = lambda: file  # type: ignore[method-assign]

    def write(self, _: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_lost_terminal_ends_the_command_by_its_signal(tmp_path: Path) -> None:
    file = (tmp_path / "screen").open("w")
    ended = pytest.raises(Interrupted, match="SIGHUP")
    stdout = redirect_stdout(Words(Gone(file.fileno())))  # type: ignore[type-var]
    with file, ended, handled(), listening(), stdout:
        print("nobody reads this")
        assert pending() is not None, "the loop finishes its step"
        os.write(file.fileno(), b"to nowhere")
    assert (tmp_path / "screen").read_bytes() == b""


def test_a_command_may_ignore_that_its_terminal_is_gone(tmp_path: Path) -> None:
    signal.signal(HUP, signal.SIG_IGN)
    with (tmp_path / "screen").open("w") as file, handled():
        with redirect_stdout(Words(Gone(file.fileno()))):  # type: ignore[type-var]
            print("nobody reads this")
        assert pending() is None


def test_a_signal_that_cannot_be_raised_waits(pause, capsys) -> None:
    class Removed:
        def __del__(self) -> None:
            pause(1)
            raised(INT)

    shown = sys.unraisablehook
    with pytest.raises(Interrupted, match="SIGTERM"), handled(), listening():
        raised(TERM)
        Removed()
    assert capsys.readouterr().err == ""
    assert sys.unraisablehook is shown

"""The progress line: shown at once, on terminals only, and cleared before any output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from hookrun.cli import main
from hookrun.sweeps.waiting import wait_is_over, waiting, waiting_for

CLEAR = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """A function after whose call stderr is a terminal, and stdout is not."""
    found = Terminal()

    def watched() -> Terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", found)
        return found

    return watched


def test_the_line_is_cleared_before_the_configuration_is_printed(
    watch: Callable[[], Terminal], capsys
) -> None:
    terminal = watch()
    assert main(["--cfg", "job"]) == 0
    assert terminal.getvalue() == f"{CLEAR}hookrun: reading the configuration …{CLEAR}"
    assert capsys.readouterr().out.startswith("task:\n")
    assert sys.stderr is terminal


def test_the_line_is_cleared_before_an_error(watch: Callable[[], Terminal]) -> None:
    terminal = watch()
    assert main(["--nothing"]) == 2
    assert f"…{CLEAR}1 configuration error\n" in terminal.getvalue()


def test_any_output_clears_the_line_and_it_is_not_shown_again(watch: Callable[[], Terminal], capsys) -> None:
    terminal = watch()
    with waiting([]):
        waiting_for("a")
        print("text")
        waiting_for("b")
        wait_is_over()
        waiting_for("c")
    assert terminal.getvalue() == f"{CLEAR}hookrun: a …{CLEAR}{CLEAR}hookrun: b …{CLEAR}"
    assert capsys.readouterr().out == "text\n"


def test_completion_writes_nothing_to_the_terminal() -> None:
    """In a separate process, on a real terminal."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "hookrun", "-sc", "query=bash"],
        env={**os.environ, "COMP_LINE": "hookrun experiment=clip", "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.set_blocking(ours, False)
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "rb"):
        assert terminal.read() is None, "nothing was written"
    assert done.returncode == 0 and "experiment=clip_fc" in done.stdout.split()


def test_files_and_dumb_terminals_get_no_line(watch: Callable[[], Terminal], monkeypatch, capsys) -> None:
    terminal = watch()
    monkeypatch.setenv("TERM", "dumb")
    assert main(["--cfg", "job"]) == 0
    assert terminal.getvalue() == ""
    monkeypatch.undo()
    assert main(["--cfg", "job"]) == 0
    assert capsys.readouterr().err == ""

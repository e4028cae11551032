"""The output of a run: plain lines into a file, a bar on a terminal, nothing into a closed pipe."""

from __future__ import annotations

import io

import pytest

from hookrun.tasks.run.progress import Screen, numbers


def test_numbers_are_shown_with_their_units() -> None:
    found = numbers({"loss": 0.123456, "accuracy": 0.9654, "tokens": 12345, "lr": 1e-5})
    assert found == "loss 0.1235  accuracy 96.5 %  tokens 12,345  lr 1e-05"


def test_lines_are_written_as_they_are_and_a_quiet_screen_writes_none(capsys) -> None:
    texts = ["[bold]hooks[/bold] :smile: " + "x" * 300, "ein Häkchen ✓"]
    for quiet in (False, True):
        screen = Screen(quiet=quiet)
        for text in texts:
            screen.say(text)
        screen.note(["one", "two"])
        said = capsys.readouterr().out
        assert said == ("" if quiet else "\n".join([*texts, "NOTE: one", "NOTE: two"]) + "\n")


class ClosedPipe(io.StringIO):
    tried = 0

    def write(self, _: str) -> int:
        self.tried += 1
        raise BrokenPipeError


def test_a_closed_pipe_ends_the_output_and_not_the_run() -> None:
    screen, pipe = Screen(), ClosedPipe()
    screen.console.file = pipe
    screen.say("a line")
    tried = pipe.tried
    assert tried and screen.console.quiet
    screen.say("another")
    assert pipe.tried == tried


def test_a_bar_on_a_terminal_yields_each_batch_and_shows_the_progress(monkeypatch) -> None:
    monkeypatch.setattr("hookrun.tasks.run.progress._BETWEEN", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (True, False):
        monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
        screen, file, shown = Screen(), io.StringIO(), {"loss": 0.5}
        screen.console.file = file
        assert list(screen.track("cd", 4, "epoch 1/1", shown, start=2)) == ["c", "d"]
        drawn = file.getvalue()
        assert ("epoch 1/1" in drawn and "4/4" in drawn and "loss 0.5" in drawn) == terminal
        assert bool(drawn) == terminal


def test_invalid_sizes_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("0", None), ("", None), ("-3", None), ("wide", None), ("97", 97)):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("LINES", columns)
        assert Screen().width == width, columns
        assert Screen().height is None, "no terminal"

"""Passing pieces to the thread that writes, with interruptions at any point."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from hookrun.store import background
from hookrun.store.background import Background, InTwoSteps
from hookrun.tasks.loop.background_writer import BackgroundWriter


def test_where_no_thread_can_be_started_each_piece_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = list[int]()
    plain = Background[int](done.append, name="hookrun captures")
    steps = InTwoSteps[int, int](lambda piece: -piece, done.append, done.append, name="hookrun captures")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for made in (plain, steps):
            made.put(1)
            made.put(2)
            made.wait()
            made.stop()
        assert done == [1, 2, -1, -2]
    plain.put(3)
    plain.stop()
    assert done[-1] == 3 and plain.error is None and steps.error is None


def interrupted_at(line: int) -> bool:
    """Pass three pieces, with KeyboardInterrupt at the given line; returns whether that line was reached."""
    done = list[int]()
    made = Background[int](done.append, name="hookrun captures")
    handed, count = 0, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != background.__file__ or frame.f_code.co_name in ("_run", "_attempt"):
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    came = False
    before = sys.gettrace()  # of a coverage measurement
    sys.settrace(trace)
    try:
        for piece in range(3):
            made.put(piece)
            handed += 1
        made.wait()
    except KeyboardInterrupt:
        came = True
    finally:
        sys.settrace(before)
    made.wait()
    made.stop()
    assert made.error is None and handed <= len(done) <= handed + 1, line
    assert done == list(range(len(done))), line
    return came


def test_with_an_interruption_at_any_line_every_piece_is_done_once() -> None:
    line = 1
    while interrupted_at(line):
        line += 1
    assert line > 20


def test_an_interruption_of_work_without_a_thread_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class State:
        bytes = 1

        def copied(self) -> State:
            return self

    def interrupted(_: State) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(KeyboardInterrupt):
        BackgroundWriter().write(State(), interrupted)

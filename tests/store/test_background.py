"""Passing pieces to the thread that writes, with interruptions at any point."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

from hookrun.store import background
from hookrun.store.background import Background, BackgroundWriter
from hookrun.store.files import StoreError
from hookrun.store.states.tree import Flat, flatten


def test_where_no_thread_can_be_started_each_piece_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = list[int]()
    plain = Background[int](done.append, name="hookrun captures")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        plain.put(1)
        plain.put(2)
        plain.wait()
        plain.stop()
        assert done == [1, 2]
    plain.put(3)
    plain.stop()
    assert done == [1, 2, 3] and plain.error is None


def interrupted_at(line: int) -> bool:
    """Pass three pieces, with KeyboardInterrupt at the given line; returns whether that line was reached."""
    done = list[int]()
    made = Background[int](done.append, name="hookrun captures")
    handed, count = 0, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != background.__file__ or frame.f_code.co_name in (
            "_attempt",
            "_nothing",
        ):
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
    assert line > 10


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


@pytest.mark.parametrize("most", [2**26, 0])
def test_it_is_written_in_order_with_the_content_at_the_call(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_COPIED", most)  # 0: too large to be copied
    writing, written, weight = BackgroundWriter(), list[float](), torch.zeros(4)
    for _ in range(20):
        weight += 1
        writing.write(flatten({"weight": weight}), lambda tree: written.append(float(tree.tensors["0"][0])))
    writing.close()
    assert written == list(range(1, 21))


def test_a_failed_write_is_raised_once_and_nothing_is_written_after_it() -> None:
    def refuse(_: Flat) -> None:
        raise StoreError("the disk is full")

    writing, written = BackgroundWriter(), list[int]()
    writing.write(flatten({}), refuse)
    with pytest.raises(StoreError, match="full"):
        writing.wait()
    writing.write(flatten({}), lambda _: written.append(1))
    writing.close()
    assert not written

"""Passing pieces to the thread that writes, with interruptions at any point."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from hookrun.store import background
from hookrun.store.background import Background
from hookrun.store.files import StoreError


def interrupted_at(line: int) -> bool:
    """Pass three pieces, with KeyboardInterrupt at the given line; returns whether that line was reached."""
    done = list[int]()
    made = Background("hookrun captures")
    handed, count = 0, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != background.__file__ or frame.f_code.co_name == "_attempt":
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
            made.put(partial(done.append, piece))
            handed += 1
        made.wait()
    except KeyboardInterrupt:
        came = True
    finally:
        sys.settrace(before)
    made.wait()
    made.close()
    assert handed <= len(done) <= handed + 1, line
    assert done == list(range(len(done))), line
    return came


def test_with_an_interruption_at_any_line_every_piece_is_done_once() -> None:
    line = 1
    while interrupted_at(line):
        line += 1
    assert line > 10


@pytest.mark.parametrize("most", [2**26, 0])
def test_it_is_written_in_order_with_the_content_at_the_call(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_COPIED", most)  # 0: too large to be copied
    writing, written, weight = Background("states"), list[float](), torch.zeros(4)
    for _ in range(20):
        weight += 1
        writing.write({"weight": weight}, lambda tensors: written.append(float(tensors["weight"][0])))
    writing.close()
    assert written == list(range(1, 21))


def test_a_failed_write_is_raised_once_and_nothing_is_written_after_it() -> None:
    def refuse() -> None:
        raise StoreError("the disk is full")

    writing, written = Background("states"), list[int]()
    with pytest.raises(StoreError, match="full"):
        writing.put(refuse)
        writing.wait()
    writing.put(partial(written.append, 1))
    writing.close()
    assert not written

"""Walks Python's stack, where torch does not say what is running."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, then its caller, and so on to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back

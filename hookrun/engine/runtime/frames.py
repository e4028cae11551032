"""Walks Python's stack, where torch does not say what is running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn

from hookrun.engine.runtime.fast.direct_calls import CODE


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, then its caller, and so on to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


_CALL = nn.Module._call_impl.__code__


def call_frame() -> FrameType:
    """The frame of the innermost current module call: in a hook, of the call for which the hook runs.

    Outside module calls it is the caller's own frame.
    """
    here = frame = sys._getframe(1)
    while frame.f_code is not _CALL and frame.f_code is not CODE:
        outer = frame.f_back
        if outer is None:
            return here
        frame = outer
    return frame


def finished(frame: FrameType) -> bool:
    """Whether the call has ended, in any thread. If so, the locals of the frame are cleared."""
    try:
        frame.clear()
    except RuntimeError:  # the frame is being executed
        return False
    return True

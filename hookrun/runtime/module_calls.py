"""Which call of a module is under way, told by its frame on the Python stack.

That is the frame of torch's own `Module._call_impl`, or of a direct call that does without.

A frame belongs to one call in one thread, also where a module calls itself, and it tells whether the call has ended,
also where an exception ended it that torch runs no hook for (KeyboardInterrupt, SystemExit).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn

from hookrun.direct_calls import CODE

_CALL = nn.Module._call_impl.__code__


def call_frame() -> FrameType:
    """The frame of the innermost module call under way: in a hook, of the call that the hook runs for.

    The caller's own frame where no module is being called.
    """
    here = frame = sys._getframe(1)
    while frame.f_code is not _CALL and frame.f_code is not CODE:
        outer = frame.f_back
        if outer is None:
            return here
        frame = outer
    return frame


def frames_of(module: nn.Module) -> Iterator[FrameType]:
    """The frames of the calls of this module that are under way in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (code is _CALL or code is CODE) and frame.f_locals.get("self") is module:
            yield frame
            if code is _CALL and frame.f_back is not None and frame.f_back.f_code is CODE:
                frame = frame.f_back  # a direct call that left it to torch
        frame = frame.f_back


def finished(frame: FrameType) -> bool:
    """Whether the call has ended, in whichever thread; the frame then holds nothing any more."""
    try:
        frame.clear()
    except RuntimeError:  # the frame is being executed
        return False
    return True

"""Numbers the module calls within each forward of the model, for `when.call` and for activation checkpointing."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import nn

from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.compiled import tracing
from hookrun.runtime.hooks.base import RegisteredHook
from hookrun.runtime.module_calls import frames_of


class ForwardCounter(RegisteredHook):
    """Counts the forwards of the root module, so that module calls can be numbered within each."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.clock = clock

    def count(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook on the root module; if that calls itself, only the outermost call is counted."""
        if self.clock is None or tracing() or repeating() is not None:
            return
        if sum(1 for _ in islice(frames_of(module), 2)) == 1:
            self.clock.forward.number += 1


class CallCounter(RegisteredHook):
    """Numbers the calls of a module."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls = calls

    def count(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if self.calls is not None and not tracing():
            self.calls.count(module)

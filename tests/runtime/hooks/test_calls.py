"""A forward of the root module is counted once, also where the root calls itself."""

from __future__ import annotations

from torch import nn

from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.hooks.calls import CallCounter, ForwardCounter


class Recursive(nn.Module):
    def forward(self, depth: int) -> None:
        if depth:
            self(depth - 1)


def test_forwards_are_the_outermost_calls_of_the_root_and_calls_are_numbered_in_each() -> None:
    model = Recursive()
    clock = Clock(model)
    calls, seen = Calls(clock), list[tuple[int, int]]()
    model.register_forward_pre_hook(ForwardCounter(clock).count)
    model.register_forward_pre_hook(CallCounter(calls).count)
    model.register_forward_pre_hook(lambda *_: seen.append((clock.forward.number, calls.now.number)))
    model(2)
    model(1)
    assert seen == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]

"""Statistics and checks inside a compiled graph, beside the compiled model without hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from benchmarks.measure import OURS, Result, Settings, Ways, measured
from benchmarks.models import Subject, mlp, resnet18
from benchmarks.threads import threads

EVERY = {"select": {"path": "**", "leaf": True}, "hook": "forward", "action": "stats"}
NEVER = {**EVERY, "when": {"step": {"start": 1_000_000}}}
SMALL, LARGE = {"width": 128, "batch": 256}, {"width": 512, "batch": 256}

WATCH: dict[str, dict[str, Any]] = {
    "loss_spikes": {"select": "", "hook": "output_grad", "action": "check", "of": "norm", "max": 1e9, "policy": "warn"},
    "dead": {"select": "type:ReLU", "hook": "forward", "action": "check", "of": "zeros", "max": 1.5, "policy": "warn"},
    "finite": {"select": {"path": "**", "leaf": True}, "hook": "forward", "action": "check", "policy": "warn"},
    "gradients": {"select": "**", "hook": "grad", "action": "check", "of": "norm", "max": 1e9, "policy": "warn"},
}  # fmt: skip
"""Checks as those of hooks=watch, which no number breaks."""


def compiled(
    name: str,
    subject: Callable[[], Subject],
    hooks_of: dict[str, Any],
    target: float,
    *,
    trains: bool = False,
) -> Callable[[Settings], Result]:
    """The function that measures a row, after it has counted graphs, breaks and recompilations.

    trains: a forward and a backward pass; else a forward pass
    """

    def measure(settings: Settings) -> Result:
        import torch
        from torch._dynamo.utils import counters

        import hookrun

        given = subject()
        bare, ours = given.make(), given.make()
        ways = Ways()
        hooks = ways.stack.enter_context(hookrun.hooked(ours, {"hooks": hooks_of}))

        def run(call: Any) -> Any:
            output = call(given.x)
            if trains:
                output.square().mean().backward()
            return output

        with threads(2, grad=False) if not trains else nullcontext():
            counters.clear()
            fast = hooks.compile(fullgraph=True)  # first, because it discards all compiled graphs
            for _ in range(3):  # off, on and off, if there is a schedule
                run(fast)
                hooks.clock.step = 1_000_000 - hooks.clock.step
            hooks.clock.step = 0
            found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            if found != (1, 0):
                raise RuntimeError(f"{name}: {found[0]} graphs and {found[1]} breaks, expected one graph")
            fast_bare = torch.compile(bare, fullgraph=True)
            ways.add("compiled, bare", lambda: run(fast_bare), lambda: {"output": run(fast_bare)})
            ways.add(OURS, lambda: run(fast), lambda: {"output": run(fast)})
            return measured(name, ways, settings, target=target, slow=trains)

    measure.__name__ = "graph_" + name.replace(",", "").replace(" ", "_")
    return measure


def small() -> Subject:
    """About 0.4 ms a forward."""
    return mlp(**SMALL)


def large() -> Subject:
    """More than 3 ms a forward."""
    return mlp(**LARGE)


ROWS = (
    compiled("stats of every layer, small", small, {"s": EVERY}, 1.15),
    compiled("stats of every layer, off, small", small, {"s": NEVER}, 1.01),
    compiled("stats of every layer, large", large, {"s": EVERY}, 1.05),
    compiled("stats of every layer, off, large", large, {"s": NEVER}, 1.01),
    compiled("checks of watch, resnet18, training", resnet18, WATCH, 1.03, trains=True),
)

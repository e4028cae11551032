"""Entering and leaving a block with hooks, against a loop that registers plain functions and removes them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from benchmarks.measure import OURS, Result, Run, Settings, Timing, Ways, measured
from benchmarks.models import resnet18

BY_HAND = "by hand"


def capture(select: str) -> dict[str, Any]:
    """A spec with one hook that captures outputs."""
    return {"captured": {"select": select, "hook": "forward", "action": "capture"}}


def entered_by_hand(model: Any, names: Collection[str]) -> Run:
    """Registers a function on each of the modules, as one finds them by name, and removes all of them."""

    def run() -> None:
        kept = dict[str, list[Any]]()
        handles = []
        for name, module in model.named_modules():
            if name in names:
                outputs = kept[name] = list[Any]()
                keep = _appending_to(outputs)
                handles.append(module.register_forward_hook(keep))
        for handle in handles:
            handle.remove()

    return run


def _appending_to(outputs: list[Any]) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append(output)

    return keep


def entering_ways(model: Any, select: str) -> Ways:
    """Entering and leaving by hand and by hookrun, on one model."""
    import hookrun

    plan = hookrun.compile(capture(select), model)

    def run() -> None:
        with plan.install(model):
            pass

    ways = Ways()
    ways.add(BY_HAND, entered_by_hand(model, {match.path for match in plan.hooks[0].matches}))
    ways.add(OURS, run)
    return ways


def enter_one(settings: Settings) -> Result:
    """Entering and leaving with one hook on a module of resnet18: 3 times as long as by hand and 0.2 ms."""
    result = measured(
        "resnet18, enter and leave, 1 module", entering_ways(resnet18().make(), "fc"), settings, target=3
    )
    by_hand = next(timing.seconds for timing in result.timings if timing.name == BY_HAND)
    return replace(result, target=round(3 + 0.2e-3 / by_hand, 1))


def enter_resnet18(settings: Settings) -> Result:
    """Entering and leaving with captures on all modules of resnet18."""
    return measured(
        "resnet18, enter and leave, 68 modules", entering_ways(resnet18().make(), "**"), settings, target=6
    )


def enter_many(count: int) -> Callable[[Settings], Result]:
    """The same for a deep tree of many modules: the cost of each must not grow with their number."""

    def measure(settings: Settings) -> Result:
        from torch import nn

        blocks = [nn.Sequential(*[nn.Identity() for _ in range(9)]) for _ in range(count // 10)]
        ways = entering_ways(nn.Sequential(*blocks), "**")
        return measured(f"enter and leave, {count:,} modules", ways, settings, target=6, slow=True)

    measure.__name__ = f"enter_{count}"
    return measure


def compile_resnet18(settings: Settings) -> Result:
    """The time to compile captures of all modules of resnet18, without an example. Its target is in seconds."""
    import hookrun

    model, seconds = resnet18().make(), []
    spec = capture("**")
    hookrun.compile(spec, model)  # its imports
    for _ in range(settings.rounds):
        start = time.perf_counter()
        hookrun.compile(spec, model)
        seconds.append(time.perf_counter() - start)
    took, target = statistics.median(seconds), 0.006
    work = "compile captures of the 68 modules of resnet18, seconds"
    return Result(work, "one second", target, (Timing("one second", 1.0, 1.0), Timing(OURS, took, took)))


ROWS = (enter_one, enter_resnet18, enter_many(1000), enter_many(10000), compile_resnet18)

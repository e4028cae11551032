"""Statistics of every layer."""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks import by_hand
from benchmarks.measure import OURS, Result, Settings, Ways, measured
from benchmarks.models import Subject, gpt2, mlp, resnet18, running
from benchmarks.threads import threads
from benchmarks.works.hooks import hooked

KEYS = ("mean", "std", "min", "max", "norm")


def stats_ways(subject: Subject) -> Ways:
    """mean, std, min, max and norm of the outputs of all leaves that run once."""
    ways, x = Ways(), subject.x
    bare, hand, ours = subject.make(), subject.make(), subject.make()
    names = [name for name in running(subject) if name not in subject.repeated]
    hooks = hooked(ways, ours, select=names, action="stats", of=list(KEYS))

    def run() -> None:
        ours(x)
        hooks.records.clear()

    def outputs() -> dict[str, Any]:
        hooks.records.clear()
        ours(x)
        found = {f"{each['module']} {key}": each[key] for each in hooks.records for key in KEYS}
        hooks.records.clear()
        return found

    ways.add("bare", lambda: bare(x))
    ways.add("by hand", *by_hand.statistics(hand, names, x))
    ways.add(OURS, run, outputs)
    return ways


def stats_mlp(settings: Settings) -> Result:
    """mlp, five statistics of every layer."""
    with threads(1, grad=False):
        ways = stats_ways(mlp())
        return measured("mlp, mean, std, min, max, norm of every layer", ways, settings, target=2.6)


def stats_resnet18(settings: Settings) -> Result:
    """The same on resnet18."""
    with threads(2, grad=False):
        return measured("the same on resnet18", stats_ways(resnet18()), settings, target=1.10, slow=True)


def stats_gpt2(settings: Settings) -> Result:
    """The same on gpt2."""
    work, target = "the same on gpt2 of 4 layers", 1.05
    if importlib.util.find_spec("transformers") is None:
        return Result(work, "bare", target, (), missing={"transformers": "not installed"})
    with threads(2, grad=False):
        return measured(work, stats_ways(gpt2()), settings, target=target, slow=True)


ROWS = (stats_mlp, stats_resnet18, stats_gpt2)

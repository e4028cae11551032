"""Statistics of every layer."""

from __future__ import annotations

import importlib.util
from typing import Any

import hookrun
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


FOLDED_ROWS = 100_000


def fold_ways() -> Ways:
    """Mean and the nine largest values of 512 hidden units, over all rows; by hand from all of them in one tensor."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    batches = torch.randn(FOLDED_ROWS, 784).split(1000)
    spec = {"units": {"select": "3", "hook": "forward", "action": "fold", "of": ["mean", {"top": 9}]}}
    plan = hookrun.compile(spec, model, example=((batches[0][:2],), {}))
    ways = Ways()

    def run() -> None:
        for batch in batches:
            model(batch)

    def by_hand() -> dict[str, Any]:
        kept = list[Any]()
        handle = model[3].register_forward_hook(lambda module, args, output: kept.append(output))
        run()
        handle.remove()
        every = torch.cat(kept)
        values, samples = every.topk(9, dim=0)
        return {"mean": every.double().mean(0), "values": values.T, "samples": samples.T}

    def ours() -> dict[str, Any]:
        with plan.install(model) as hooks:
            run()
        fold = hooks.folds["units"]["3"]
        return {"mean": fold.mean, "values": fold.top.values, "samples": fold.top.samples}

    ways.add("bare", run)
    ways.add("by hand", by_hand, by_hand)
    ways.add(OURS, ours, ours)
    return ways


def fold_rows(settings: Settings) -> Result:
    """A fold of mean and top over 100,000 rows."""
    with threads(2, grad=False):
        work = "a fold of mean and top over 100,000 rows"
        return measured(work, fold_ways(), settings, target=1.15, slow=True)


ROWS = (stats_mlp, stats_resnet18, stats_gpt2, fold_rows)

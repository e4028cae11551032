"""On a GPU: captures beside references kept by hand, and training with statistics of some steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import by_hand
from benchmarks.measure import OURS, Result, Run, Settings, Ways, measured
from benchmarks.models import Subject, gpt2, resnet18, running
from benchmarks.works.hooks import captures_by_hookrun, hooked

REFERENCES = "by hand, by reference"
STEPS = 50


def accelerator() -> Any:
    """The machine's accelerator, or None; not the second device of the tests, on which time means nothing."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "second" else found


def ended(run: Run) -> Run:
    """The work with the wait for the device, so that its time is that of the device too."""
    import torch

    def until_done() -> None:
        run()
        torch.accelerator.synchronize()

    return until_done


def on_accelerator(subject: Subject) -> Subject:
    """The same model and input on the accelerator."""
    device = accelerator()
    return replace(subject, make=lambda: subject.make().to(device), x=subject.x.to(device))


def captured(work: str, make: Callable[[], Subject], needs: str) -> Callable[[Settings], Result]:
    """The function that measures captures of all leaves of a model."""

    def measure(settings: Settings) -> Result:
        import torch

        target = 1.05
        if accelerator() is None:
            return Result(work, REFERENCES, target, (), missing={OURS: "this machine has no GPU"})
        if importlib.util.find_spec(needs) is None:
            return Result(work, REFERENCES, target, (), missing={needs: "not installed"})
        subject, ways = on_accelerator(make()), Ways()
        with torch.no_grad():
            names = running(subject)
            run, _ = by_hand.captures(subject.make(), names, subject.x, clone=False)
            ways.add(REFERENCES, ended(run))
            run, clones = by_hand.captures(subject.make(), names, subject.x, clone=True)
            ways.add("by hand, cloned", ended(run), clones)
            run, ours = captures_by_hookrun(ways, subject, names)
            ways.add(OURS, ended(run), ours)
            return measured(work, ways, settings, target=target, base=REFERENCES, slow=True)

    measure.__name__ = f"capture_{make.__name__}_on_gpu"
    return measure


def trained(model: Any, x: Any, step: Callable[[], object]) -> Run:
    """Some steps of training with SGD, each followed by `step`."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step()

    return run


def stats_in_training(settings: Settings) -> Result:
    """Training of resnet18 with statistics of every layer in one step of 50."""
    work, target = f"train resnet18 on a GPU, stats of every layer each {STEPS} steps", 1.01
    if accelerator() is None:
        return Result(work, "bare", target, (), missing={OURS: "this machine has no GPU"})
    subject, ways = on_accelerator(resnet18()), Ways()
    bare, ours = subject.make().train(), subject.make().train()
    names = running(subject)
    hooks = hooked(ways, ours, select=names, action="stats", when={"step": {"every": STEPS}})

    def stepped() -> None:
        hooks.step()
        hooks.records.clear()

    ways.add("bare", ended(trained(bare, subject.x, lambda: None)))
    ways.add(OURS, ended(trained(ours, subject.x, stepped)))
    return measured(work, ways, settings, target=target, slow=True)


ROWS = (
    captured("resnet18 on a GPU, capture 52 leaves", resnet18, "torchvision"),
    captured("gpt2 of 4 layers on a GPU, capture 41 leaves", gpt2, "transformers"),
    stats_in_training,
)

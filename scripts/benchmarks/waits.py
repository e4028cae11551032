"""How often a step makes the host wait for a device, counted on the second device of the tests: no clock is read."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parents[2] / "tests" / "helpers"
BATCHES = 3, 9
"""The lengths of two passes; what a batch costs is the difference."""

SMALL = ("data.batch_size=8", "compute.device=second", "compute.threads=1", "task.loggers=[]")
NAMES = ("model=decoder", "model.args.width=16", "model.args.length=48", "data=names", "data.batch_size=2")
CAPTURE = "+hooks.seen={select: relu1, hook: forward, action: capture}"
TRAIN = (*SMALL, "train.epochs=1", "train.log_every=1000", "train.checkpoint.every=null")

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "train, fp32": TRAIN,
    "train, bf16": (*TRAIN, "compute.precision=bf16"),
    "train, fp16": (*TRAIN, "compute.precision=fp16"),
    "train with one capture": (*TRAIN, CAPTURE),
    "train, a line of metrics each step": (*TRAIN, "train.log_every=1"),
    "evaluate": (*SMALL, "task=evaluate"),
    "predict": (*SMALL, "task=predict"),
    "predict with one capture": (*SMALL, "task=predict", CAPTURE),
    "attribute": (*SMALL, "task=attribute", "task.steps=2"),
    "generate 4 tokens": (*SMALL, *NAMES, "task=generate", "task.max_new_tokens=4"),
    "lens": (*SMALL, *NAMES, "task=lens"),
}
"""What is typed for each row of the command line."""

KEYS: Mapping[str, dict[str, Any]] = {
    "": {},
    "when: {value: …}": {"when": {"value": {"of": "mean", "above": 0}}},
    "index": {"index": "..., 0:2"},
}
FURTHER: Mapping[str, dict[str, Any]] = {
    "scale by a ramp": {"action": "scale", "factor": {"from": 1, "to": 2, "steps": [0, 100]}},
    "clamp by a ramp": {"action": "clamp", "max": {"from": 1, "to": 2, "steps": [0, 100]}},
    "clamp, a bound beyond 65504": {"action": "clamp", "max": 1e6},
    "capture, keep: {every: 2}": {"action": "capture", "keep": {"every": 2}},
    "check, policy: error": {"action": "check", "max": 1e6, "policy": "error"},
    "check, policy: stop": {"action": "check", "max": 1e6, "policy": "stop"},
}
"""Hooks on `forward` that the joint table does not have."""


@dataclass(frozen=True)
class Count:
    """The host's waits and blocking uploads in one step, or for one batch of a command.

    places: the lines of code where they happen
    """

    work: str
    waits: float
    uploads: float
    places: tuple[str, ...] = ()


def second_device() -> Any:
    """The module of the device, installed in this process."""
    for folder in (HELPERS, HELPERS.parents[1] / "scripts"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import second_device

    second_device.install()
    return second_device


def of_hooks() -> Iterator[Count]:
    """The third step of a small training under each hook, by action; hook types with the same counts share a row."""
    watch = second_device().watch
    from joint_table import rows

    found = dict[tuple[str, float, float, tuple[str, ...]], list[str]]()
    for row in rows():
        for name, keys in KEYS.items():
            if (count := of_step(watch, {**row.spec["h"], **keys})) is not None:
                work = f"{row.name.replace('`', '')}{name and f', {name}'}"
                found.setdefault((work, *count), []).append(row.hook)
    for name, hook in FURTHER.items():
        if (count := of_step(watch, {"select": "block.0", "hook": "forward", **hook})) is not None:
            found[(name, *count)] = ["forward"]
    for (work, waits, uploads, places), hooks in sorted(found.items()):
        yield Count(f"{work} on {', '.join(hooks)}", waits, uploads, places)


def of_step(watch: Callable[[], Any], hook: dict[str, Any]) -> tuple[float, float, tuple[str, ...]] | None:
    """Waits, uploads and their places in the third step; None if the hook is refused, or does not fit the network."""
    import hookrun

    try:
        for _ in stepped(hook, "cpu"):
            pass
    except (hookrun.CompileError, hookrun.HookError):
        return None
    steps = stepped(hook, "second")
    next(steps)
    next(steps)
    with watch() as seen:
        next(steps)
    places = tuple(sorted({where for _, where in (*seen.waits, *seen.uploads)}))
    return len(seen.waits), len(seen.uploads), places


def stepped(hook: dict[str, Any], device: str) -> Iterator[None]:
    """Three steps of training under the hook, one after the other; what is needed first is there before the first."""
    import torch
    from joint_table import Network

    import hookrun

    model = Network().to(device)
    inputs = [torch.randn(5, 8).to(device).requires_grad_() for _ in range(3)]
    samples = torch.arange(5)
    with contextlib.redirect_stdout(io.StringIO()), hookrun.hooked(model, {"h": hook}) as hooks:
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, foreach=True)
        for x in inputs:
            hooks.samples = samples
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            hooks.step()
            yield


def of_commands() -> Iterator[Count]:
    """Each command of the command line, for one further batch."""
    watch = second_device().watch
    from hookrun.cli import main

    def seen_in(argv: tuple[str, ...], batches: int) -> Any:
        with tempfile.TemporaryDirectory() as folder, watch() as seen:
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = main([*argv, f"train.limit_batches={batches}", f"hydra.run.dir={folder}/run"])
            if code:
                raise RuntimeError(f"hookrun ended with {code}: {said.getvalue()[-2000:]}")
        return seen

    few, many = BATCHES
    for name, argv in COMMANDS.items():
        seen_in(argv, few)  # what the first run of a process does once
        before, after = seen_in(argv, few), seen_in(argv, many)
        waits = (len(after.waits) - len(before.waits)) / (many - few)
        uploads = (len(after.uploads) - len(before.uploads)) / (many - few)
        more = places_of(after) - places_of(before)
        yield Count(name, waits, uploads, tuple(sorted(more)))


def places_of(seen: Any) -> Counter[str]:
    """How often each place in the code waited or uploaded."""
    return Counter(where for kind, _, where in seen if kind != "late")


def shown(counts: list[Count]) -> str:
    """The counts as a table in Markdown; those without waits and uploads are listed in one line."""
    lines = ["| work | waits | uploads | where |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {each.work} | {each.waits:g} | {each.uploads:g} | {', '.join(each.places)} |"
        for each in counts
        if each.waits or each.uploads
    ]
    without = [each.work for each in counts if not each.waits and not each.uploads]
    return "\n".join([*lines, "", f"no wait and no upload: {'; '.join(without) or 'none'}"])

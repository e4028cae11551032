"""Installs the hooks on the model, runs a task under them, and prints a summary of each hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.amp import GradScaler

from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.interruptions import listening
from hookrun.models import RANDOM
from hookrun.plan import table
from hookrun.runtime import Installation
from hookrun.runtime.reduced import ReducedGradients
from hookrun.store.environment import environment
from hookrun.store.rank_dir import take_kept
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.context import RunContext
from hookrun.tasks.loop.execute import ending
from hookrun.tasks.loop.loggers import Loggers
from hookrun.tasks.loop.loggers.base import LoggedRun
from hookrun.tasks.loop.over_ranks import RANKS, bytes_of_all, counts_of_all, effects_of_all, left_out
from hookrun.tasks.loop.prepared import Prepared
from hookrun.tasks.loop.progress import Screen
from hookrun.tasks.loop.rank_fit import under_ranks
from hookrun.tasks.loop.resuming import Resuming
from hookrun.tasks.loop.session import session
from hookrun.tasks.loop.sharding import shard
from hookrun.tasks.loop.sink import RunSink
from hookrun.tasks.loop.summaries import hook_facts, hook_lines, inactive_lines, model_facts, summary


def show_plan(prepared: Prepared, screen: Screen, limit: int | None = None) -> None:
    """Print the plan with at most `limit` modules for each hook (None: all), the weights' source, lines and notes."""
    several = prepared.settings.compute.strategy != "none"
    table.show(prepared.plan, screen.console, limit, under_ranks(prepared.plan) if several else None)
    screen.say(f"weights: {_weights(prepared)}")
    for line in prepared.lines:
        screen.say(line)
    screen.note(prepared.notes)


def _weights(prepared: Prepared) -> str:
    task = prepared.task
    if prepared.weights != RANDOM or task.trains:
        return prepared.weights
    return (
        f"{RANDOM}, and task={task.name} does not train them (model.weights takes a file or a published name)"
    )


def run_under_hooks(
    prepared: Prepared, run_dir: RunDir, perform: Callable[[RunContext], None], *, loggers: Sequence[str]
) -> str | None:
    """Run a task under its hooks; returns why a check stopped it, or None.

    perform: the task itself, called with the hooks installed
    loggers: the names of the loggers to open

    Raises HookrunError under `strict` if a hook matched modules but did nothing.
    """
    run_dir.write_plan(prepared.plan.to_dict())
    run_dir.write_env(environment(device=str(prepared.device)))
    run_dir.write_model(model_facts(prepared.model, prepared.weights))
    settings = prepared.settings
    ranks = run_dir.ranks
    screen = Screen(quiet=not ranks.is_main)
    show_plan(prepared, screen, table.SHOWN)
    sharded = ranks.several and settings.compute.strategy == "fsdp"
    together, reduced = Loggers(), ReducedGradients(stands_in=sharded) if ranks.several else None
    sink = RunSink(run_dir, screen.say, together)
    hooked = [hook.spec for hook in prepared.plan.hooks]
    sink.of_rows = {each.name for each in hooked if each.hook_type.of_rows or each.keys.when.rank is not None}
    model = prepared.model.to(prepared.device)
    scaler = GradScaler(prepared.device.type, enabled=settings.compute.precision == "fp16")
    with (
        together.open(loggers if ranks.is_main else (), LoggedRun(run_dir.path, _config(prepared))),
        session(settings.compute, settings.seed),
        Installation(
            prepared.plan, model, sink=sink, scaler=scaler, restored=prepared.applied, reduced=reduced
        ) as hooks,
    ):
        _load_leftover(prepared, hooks)
        resuming = Resuming(prepared, run_dir, model, hooks)
        if sharded:
            if prepared.trained is not None:
                prepared.trained.freeze_rest(model)  # parameters that hooks have added
            shard(model, settings.compute.fsdp, prepared.device, ranks.size)
            hooks.follow_parameters()
        if run_dir.resumed is not None:
            screen.say(f"resumed from {run_dir.resumed.path.name}, step {hooks.clock.step}")
            of_rank = {each.spec.name: each.spec.keys.when.rank for each in prepared.plan.hooks}
            chosen = {name: of for name, of in of_rank.items() if of is not None}
            screen.note(left_out(len(run_dir.resumed.part(RANKS)), ranks, chosen))
        running = RunContext(
            prepared, hooks, sink, run_dir, screen, scaler, resuming, reduced or ReducedGradients()
        )
        # Records are written after a failure too, since they may explain it.
        last = (
            resuming.writer.close,
            sink.settle,
            run_dir.flush,
            lambda: run_dir.write_hooks(hook_facts(hooks)),
        )
        with ending(*last), listening():
            perform(running)
            sink.settle()
            take_kept(run_dir)
            effects_of_all(hooks, ranks)
            bytes_of_all(sink.bytes, sink.of_rows, ranks)
            if any(each.action.captures for each in hooked):
                counts_of_all(run_dir.captures.counts, ranks, run_dir.reached)
        stopped = hooks.stopped
        if (inactive := inactive_lines(hooks)) and settings.strict and stopped is None:
            for line in hook_lines(running):
                screen.say(line)
            raise HookrunError("\n".join(["strict: hooks matched and did nothing", *inactive]))
        for line in summary(running):
            screen.say(line)
    return stopped


def _config(prepared: Prepared) -> dict[str, Any]:
    """The experiment as plain values, for loggers."""
    settings = prepared.settings.model_dump(mode="json", serialize_as_any=True)
    settings["task"] = {"name": prepared.task.name, **settings["task"]}
    hooks = {hook.pop("name"): hook for hook in prepared.plan.to_dict()["hooks"]}
    return {**settings, "hooks": hooks}


def _load_leftover(prepared: Prepared, hooks: Installation) -> None:
    """Load the values of parameters that hooks add from the file of `model.weights`. SpecError for a wrong shape."""
    added = dict(hooks.named_parameters())
    for name, tensor in prepared.leftover.items():
        if tensor.shape != added[name].shape:
            shapes = f"{list(tensor.shape)} in the file, and its hook adds {list(added[name].shape)}"
            hint = "use the hooks that the file was saved with"
            raise SpecError([Problem("model.weights", f"{name} has shape {shapes}", hint)])
        added[name].data.copy_(tensor)

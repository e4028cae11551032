"""What a run of the model under its hooks has open while it lasts: session, hooks, loggers, resumable states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from torch import nn
from torch.amp import GradScaler

from hookrun.engine.plan.plan import SHOWN
from hookrun.engine.plan.table import show
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.install import describe_inactive
from hookrun.engine.runtime.reduced import ReducedGradients
from hookrun.engine.spec import HookSpec
from hookrun.errors import HookrunError, spec_error
from hookrun.models import RANDOM
from hookrun.models.weights import change_of
from hookrun.run.experiment.metrics.losses import ActivationLoss
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.experiment.rank_fit import under_ranks
from hookrun.run.experiment.session import device_notes, on_device, session
from hookrun.run.experiment.sharding import shard
from hookrun.run.passes.context import RunContext
from hookrun.run.passes.endings import ending, hook_facts, hook_lines, in_this_process, model_facts
from hookrun.run.passes.loggers import LoggedRun, Loggers
from hookrun.run.passes.over_ranks import (
    RANKS,
    bytes_of_all,
    counts_of_all,
    effects_of_all,
    folds_of_all,
    left_out,
)
from hookrun.run.passes.progress import Screen
from hookrun.run.passes.resuming import Resuming
from hookrun.run.passes.sink import RunSink
from hookrun.signals import listening
from hookrun.store.format import ENV, HOOKS, MODEL, PLAN
from hookrun.store.run_dir import RunDir, environment


def run_under_hooks(
    prepared: Prepared, run_dir: RunDir, perform: Callable[[RunContext], None], *, loggers: Sequence[str]
) -> str | None:
    """Run a task under its hooks; returns why a check stopped it, or None.

    perform: the task itself, called with the hooks installed
    loggers: the names of the loggers to open

    Raises HookrunError under `strict` if a hook matched modules but did nothing.
    """
    screen = Screen(quiet=not run_dir.ranks.is_main)
    run_dir.write(PLAN, prepared.plan.to_dict())
    run_dir.write(ENV, environment(device=str(prepared.device)))
    run_dir.write(MODEL, {**model_facts(prepared.model, prepared.weights), "trained": prepared.task.trains})
    show_plan(prepared, screen, SHOWN)
    with opened_run(prepared, run_dir, screen, loggers) as context:
        _perform(context, perform)
        for line in hook_lines(context):
            screen.say(line)
        inactive = describe_inactive(context.hooks.unexplained, SHOWN)
        stopped = context.hooks.stopped
        if inactive and prepared.settings.strict and stopped is None:
            raise HookrunError("\n".join(["strict: hooks matched and did nothing", *inactive]))
        screen.note(inactive, "WARNING: {}".format)
        screen.say(f"run directory: {run_dir.path}")
    return stopped


@contextmanager
def opened_run(
    prepared: Prepared, run_dir: RunDir, screen: Screen, loggers: Sequence[str]
) -> Iterator[RunContext]:
    """Everything that the task works with, opened; the hooks are installed within it."""
    settings, ranks = prepared.settings, run_dir.ranks
    is_sharded = ranks.several and settings.compute.strategy == "fsdp"
    repeats = prepared.task.repeats_passes
    reduced = ReducedGradients(needs_dummy_passes=is_sharded or repeats) if ranks.several or repeats else None
    opened = Loggers()
    logged = LoggedRun(run_dir.path, _config(prepared) if loggers else {})
    sink = _sink_of(prepared, run_dir, screen, opened)
    model = on_device(prepared.model, prepared.device)
    screen.note(device_notes(settings.compute, prepared.device, model))
    scaler = GradScaler(prepared.device.type, enabled=settings.compute.precision == "fp16")
    installation = Installation(
        prepared.plan,
        model,
        sink=sink,
        scaler=scaler,
        restored=prepared.applied,
        reduced=reduced,
        replace_op=prepared.replace_op,
    )
    with (
        opened.open(loggers if ranks.is_main else (), logged),
        session(settings.compute, settings.seed),
        installation as hooks,
        _loss_watching(prepared, model),
    ):
        if prepared.leftover:
            _load_leftover(prepared)
        resuming = Resuming(prepared, run_dir, model, hooks)
        if prepared.trained is not None:
            prepared.trained.freeze_rest(model)  # parameters that hooks have added
        if is_sharded:
            shard(model, settings.compute.fsdp, prepared.device, ranks.size)
            hooks.follow_parameters()
        if run_dir.resumed is not None:
            screen.say(f"resumed from {run_dir.resumed.path.name}, step {hooks.clock.step}")
            screen.note(resuming.notes)
            before = len(run_dir.resumed.part(RANKS))
            screen.note(left_out(before, ranks, _ranks_chosen_by(_hooks_of(prepared))))
        yield RunContext(
            prepared, hooks, sink, run_dir, screen, scaler, resuming, reduced or ReducedGradients()
        )


def _perform(context: RunContext, perform: Callable[[RunContext], None]) -> None:
    """Run the task, then write what the run has recorded: after a failure too, since that may explain it."""
    run_dir, sink, hooks, ranks = context.run_dir, context.sink, context.hooks, context.ranks
    last = (
        context.resuming.writer.close,
        partial(_end_failed_step, hooks),
        sink.settle,
        run_dir.flush,
        lambda: run_dir.write(HOOKS, hook_facts(hooks)),
    )
    with ending(*last), listening():
        with in_this_process():
            perform(context)
        hooks.clock.end_step()
        context.write_records()
        run_dir.write_folds(folds_of_all(hooks, ranks))
        if ranks.several:
            effects_of_all(hooks, ranks)
            bytes_of_all(sink.bytes, sink.rank_local_hooks, ranks)
        if any(hook.action.captures for hook in _hooks_of(context.prepared)):
            counts_of_all(run_dir.captures.counts, ranks, run_dir.reached)


def _end_failed_step(hooks: Installation) -> None:
    """Let rules over steps judge what a step that has raised an exception has seen: it may explain the exception."""
    with suppress(HookrunError):
        hooks.clock.end_step()


def _hooks_of(prepared: Prepared) -> list[HookSpec]:
    return [hook.spec for hook in prepared.plan.hooks]


def _ranks_chosen_by(hooks: Sequence[HookSpec]) -> dict[str, frozenset[int]]:
    """Hook -> the ranks on which `when.rank` lets it act, for those that have it."""
    return {hook.name: hook.keys.when.rank for hook in hooks if hook.keys.when.rank is not None}


def _sink_of(prepared: Prepared, run_dir: RunDir, screen: Screen, loggers: Loggers) -> RunSink:
    """Where the hooks' records and captures go."""
    sink = RunSink(run_dir, screen.say, loggers)
    hooks = _hooks_of(prepared)
    local = set(_ranks_chosen_by(hooks))
    for hook in hooks:
        if hook.hook_type.sees_batch and not hook.action.reports_loss:
            local.add(hook.name)
    sink.rank_local_hooks = local
    return sink


def _loss_watching(prepared: Prepared, model: nn.Module) -> AbstractContextManager[object]:
    """A block within which a loss of activations sees its module."""
    loss = prepared.loss.function
    return loss.watching(model) if isinstance(loss, ActivationLoss) else nullcontext()


def _load_leftover(prepared: Prepared) -> None:
    """Load the values of what hooks add from the file of `model.weights`. SpecError for a misfit."""
    for name, tensor in prepared.leftover.items():
        path, _, own = name.rpartition(".")
        added = getattr(prepared.model.get_submodule(path), own)
        if tensor.shape != added.shape:
            raise spec_error(
                "model.weights",
                f"{name} has shape {list(tensor.shape)} in the file, and its hook adds {list(added.shape)}",
                "use the hooks that the file was saved with",
            )
        if change := change_of(tensor, added):
            raise spec_error("model.weights", f"{name} is {change}", "save the weights as floating point")
        added.data.copy_(tensor)


def show_plan(prepared: Prepared, screen: Screen, limit: int | None = None) -> None:
    """Print the plan with at most `limit` modules for each hook (None: all), the weights' source, lines and notes."""
    several = prepared.settings.compute.strategy != "none"
    console = screen.for_plan(has_hooks=bool(prepared.plan.hooks))
    show(prepared.plan, console, limit, under_ranks(prepared.plan) if several else None)
    weights, task = prepared.weights, prepared.task
    if weights == RANDOM and not task.trains:
        weights += (
            f", and task={task.name} does not train them (model.weights takes a file or a published name)"
        )
    for line in (f"weights: {weights}", *prepared.lines):
        console.print(line)
    screen.note(prepared.notes)


def _config(prepared: Prepared) -> dict[str, Any]:
    """The experiment as plain values, for loggers."""
    settings = prepared.settings.model_dump(mode="json", serialize_as_any=True)
    settings["task"] = {"name": prepared.task.name, **settings["task"]}
    hooks = {hook.pop("name"): hook for hook in prepared.plan.to_dict()["hooks"]}
    return {**settings, "hooks": hooks}

"""A whole run, from a prepared experiment to its finished directory; read this file first.

ready = prepare(experiment)            hookrun.run.tasks: model, data, and the plan of the hooks, proven on a copy
execute(ready, path)                   this file: the run directory and its status
    run_under_hooks(ready, ...)        session, hooks on the model, loggers, resumable states
        task.perform(context)          tasks/train.py, evaluate.py, predict.py, ...: batches through the model
            train(context)             training.py: epochs of steps, validation, checkpoints
                train_step(training)   step.py: forward, backward, clip, check, step, log
    hook_lines(context)                endings.py: how often each hook fired, what it changed
hookrun.report                         report.html, made from the directory alone
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.amp import GradScaler

from hookrun.engine.plan.plan import SHOWN
from hookrun.engine.plan.table import show
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.install import describe_inactive
from hookrun.engine.runtime.reduced import ReducedGradients
from hookrun.errors import HookrunError, first_lines, spec_error
from hookrun.models import RANDOM
from hookrun.models.weights import change_of
from hookrun.run.experiment.metrics.losses import ActivationLoss
from hookrun.run.experiment.prepare import Prepared
from hookrun.run.experiment.rank_fit import under_ranks
from hookrun.run.experiment.session import device_notes, on_device, session
from hookrun.run.experiment.sharding import shard
from hookrun.run.experiment.task import Ready, goal_of
from hookrun.run.passes.agreement import require_shared_disk
from hookrun.run.passes.context import RunContext
from hookrun.run.passes.endings import (
    ending,
    failure_recorded,
    hook_facts,
    hook_lines,
    in_this_process,
    model_facts,
    print_failure,
)
from hookrun.run.passes.loggers import LoggedRun, Loggers
from hookrun.run.passes.over_ranks import RANKS, bytes_of_all, counts_of_all, effects_of_all, left_out
from hookrun.run.passes.progress import Screen
from hookrun.run.passes.resuming import Resuming, require_same
from hookrun.run.passes.sink import RunSink
from hookrun.run.ranks import ALONE, Ranks
from hookrun.signals import listening, shielded
from hookrun.store.files import StoreError
from hookrun.store.format import ENV, HOOKS, METRICS, MODEL, PLAN
from hookrun.store.records import MetricsLine, read_records
from hookrun.store.run_dir import RunDir, environment
from hookrun.store.scores import result
from hookrun.store.states.files import (
    SavedState,
    newest_state,
    read_state,
    remove_states,
    remove_unfinished,
)

STOPPED = 3


def execute(
    ready: Ready, path: Path, *, go_on: bool = False, anyway: bool = False, ranks: Ranks = ALONE
) -> int:
    """Run the task in the directory `path`.

    go_on:  resume an unfinished run in its directory, from its newest undamaged state; without any state, its records
            are deleted and it starts from the beginning
    anyway: resume even if the state was saved with another configuration, model, data or version
    ranks:  the processes of the run; this process is rank 0, and the others call `execute_as_rank`

    Returns 0, or 3 if a check with policy `stop` ended the run. An exception is written to status.json before it is
    raised, except a SpecError because the state does not fit: then no file is changed.
    """
    buffer = ready.settings.compute.capture_buffer * 2**20
    with ranks.failures_told():  # the other ranks wait for the directory
        goal = goal_of(ready.experiment)
        run_dir = _reopened(ready, path, buffer, anyway=anyway) if go_on else RunDir.create(path, buffer)
    run_dir.ranks = ranks
    with failure_recorded(run_dir), ranks.failures_told():
        run_dir.set_status("running")
        state = run_dir.resumed
        ranks.gathered([str(run_dir.path), None if state is None else [state.path.name, state.digest]])
        require_shared_disk(run_dir.path, ranks, ready, resumes=state is not None)
        with ending(run_dir.close):
            stopped = ready.task.execute(ready, run_dir)
        run_dir.see_ranks(ready.settings.compute.timeout)
        objective = None
        if goal is not None and stopped is None:
            objective = result(read_records(run_dir.path / METRICS, MetricsLine), goal).model_dump()
        run_dir.write_manifest()
        with shielded():
            run_dir.set_status("done" if stopped is None else "stopped", stopped or "", objective=objective)
    if stopped is not None:
        print(f"stopped by a check: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    if not ready.settings.train.checkpoint.keep_done:
        print_failure(partial(remove_states, path))
    return 0


def run_under_hooks(
    prepared: Prepared, run_dir: RunDir, perform: Callable[[RunContext], None], *, loggers: Sequence[str]
) -> str | None:
    """Run a task under its hooks; returns why a check stopped it, or None.

    perform: the task itself, called with the hooks installed
    loggers: the names of the loggers to open

    Raises HookrunError under `strict` if a hook matched modules but did nothing.
    """
    run_dir.write(PLAN, prepared.plan.to_dict())
    run_dir.write(ENV, environment(device=str(prepared.device)))
    run_dir.write(MODEL, {**model_facts(prepared.model, prepared.weights), "trained": prepared.task.trains})
    settings, ranks = prepared.settings, run_dir.ranks
    screen = Screen(quiet=not ranks.is_main)
    show_plan(prepared, screen, SHOWN)
    sharded = ranks.several and settings.compute.strategy == "fsdp"
    repeats = prepared.task.repeats_passes
    reduced = ReducedGradients(stands_in=sharded or repeats) if ranks.several or repeats else None
    opened, logged = Loggers(), LoggedRun(run_dir.path, _config(prepared) if loggers else {})
    sink = RunSink(run_dir, screen.say, opened)
    hooked = [hook.spec for hook in prepared.plan.hooks]
    sink.of_rows = {each.name for each in hooked if each.hook_type.of_rows or each.keys.when.rank is not None}
    model = on_device(prepared.model, prepared.device)
    screen.note(device_notes(settings.compute, prepared.device, model))
    scaler = GradScaler(prepared.device.type, enabled=settings.compute.precision == "fp16")
    with (
        opened.open(loggers if ranks.is_main else (), logged),
        session(settings.compute, settings.seed),
        Installation(
            prepared.plan,
            model,
            sink=sink,
            scaler=scaler,
            restored=prepared.applied,
            reduced=reduced,
            around=prepared.around,
        ) as hooks,
        loss.watching(model) if isinstance(loss := prepared.loss.function, ActivationLoss) else nullcontext(),
    ):
        if prepared.leftover:
            _load_leftover(prepared)
        resuming = Resuming(prepared, run_dir, model, hooks)
        if prepared.trained is not None:
            prepared.trained.freeze_rest(model)  # parameters that hooks have added
        if sharded:
            shard(model, settings.compute.fsdp, prepared.device, ranks.size)
            hooks.follow_parameters()
        if run_dir.resumed is not None:
            screen.say(f"resumed from {run_dir.resumed.path.name}, step {hooks.clock.step}")
            screen.note(resuming.notes)
            chosen = {each.name: each.keys.when.rank for each in hooked if each.keys.when.rank is not None}
            screen.note(left_out(len(run_dir.resumed.part(RANKS)), ranks, chosen))
        context = RunContext(
            prepared, hooks, sink, run_dir, screen, scaler, resuming, reduced or ReducedGradients()
        )
        # Records are written after a failure too, since they may explain it.
        last = (
            resuming.writer.close,
            sink.settle,
            run_dir.flush,
            lambda: run_dir.write(HOOKS, hook_facts(hooks)),
        )
        with ending(*last), listening():
            with in_this_process():
                perform(context)
            context.write_records()
            if ranks.several:
                effects_of_all(hooks, ranks)
                bytes_of_all(sink.bytes, sink.of_rows, ranks)
            if any(each.action.captures for each in hooked):
                counts_of_all(run_dir.captures.counts, ranks, run_dir.reached)
        for line in hook_lines(context):
            screen.say(line)
        inactive, stopped = describe_inactive(hooks.unexplained, SHOWN), hooks.stopped
        if inactive and settings.strict and stopped is None:
            raise HookrunError("\n".join(["strict: hooks matched and did nothing", *inactive]))
        screen.note(inactive, "WARNING")
        screen.say(f"run directory: {run_dir.path}")
    return stopped


def _reopened(ready: Ready, path: Path, buffer: int, *, anyway: bool) -> RunDir:
    """The directory of an unfinished run, reset to its newest undamaged state."""
    saved, damaged = newest_state(path)
    for line in first_lines(f"{line}; it is ignored" for line in damaged.values()):
        print(line, file=sys.stderr, flush=True)
    if saved is None and damaged and not anyway:
        raise spec_error(
            "resume",
            f"{path} has no undamaged state of this version",
            "type resume_anyway=true to start from the beginning and lose the records",
        )
    if saved is not None and not anyway:
        require_same(saved, ready, path)
    if saved is None:
        print(f"no state was saved in {path}: the run starts from the beginning", flush=True)
    run_dir = RunDir.reopen(path, None if saved is None else saved.part("files"), buffer)
    remove_unfinished(path, damaged)
    run_dir.resumed = saved
    return run_dir


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


def execute_as_rank(ready: Ready, ranks: Ranks) -> int:
    """Run the task on a rank other than 0, in the directory that rank 0 sends. Returns what `execute` returns."""
    with ranks.failures_told():
        place, state = ranks.gathered(None)[0]
        if place is None:  # another process has just finished the run
            return 0
        require_shared_disk(Path(place), ranks, ready, resumes=state is not None)
        saved = None if state is None else _same_state(Path(place), state, ranks)
        position = None if saved is None else saved.part("files")
        run_dir = RunDir(Path(place), ready.settings.compute.capture_buffer * 2**20, ranks, position)
        run_dir.resumed = saved
        with ending(run_dir.close):
            stopped = ready.task.execute(ready, run_dir)
        run_dir.see_ranks(ready.settings.compute.timeout)
    return 0 if stopped is None else STOPPED


def _same_state(run: Path, state: tuple[str, str], ranks: Ranks) -> SavedState:
    """The state from which rank 0 resumes the run. StoreError if this rank reads another one.

    state: its name and its digest
    """
    name, digest = state
    saved = read_state(run, name)
    if saved.digest != digest:
        raise StoreError(f"{saved.path} is another state than the one that rank 0 reads (rank {ranks.rank})")
    return saved


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

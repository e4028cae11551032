"""Runs a prepared experiment in a directory, and leaves there how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from torch.amp import GradScaler

from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.plan.table import show as show_plan
from hookrun.runtime import Installation
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir, environment
from hookrun.tasks.analysis import Analysis, analyse
from hookrun.tasks.export import export
from hookrun.tasks.loop.board import Board
from hookrun.tasks.loop.facts import hook_facts, model_facts
from hookrun.tasks.loop.progress import Screen
from hookrun.tasks.loop.running import Running
from hookrun.tasks.loop.session import session
from hookrun.tasks.loop.sink import RunSink
from hookrun.tasks.loop.summary import inactive_lines, summary
from hookrun.tasks.predict import evaluate, predict
from hookrun.tasks.prepare import Prepared
from hookrun.tasks.train import train

STOPPED = 3


def run(prepared: Prepared | Analysis, path: Path) -> int:
    """Run the task in the directory `path`.

    Returns 0, or 3 if a check with policy `stop` ended the run. Whatever is raised is in status.json before.
    """
    run_dir = RunDir.create(path, prepared.settings.compute.capture_buffer * 2**20)
    run_dir.set_status("running")
    try:
        with _ending(run_dir.close):
            stopped = None
            if isinstance(prepared, Analysis):
                run_dir.write_env(environment())
                analyse(prepared, run_dir)
            else:
                stopped = _run(prepared, run_dir)
        run_dir.write_manifest()
    except BaseException as error:
        _told(partial(_set_failed, run_dir, error))
        raise
    if stopped is not None:
        run_dir.set_status("stopped", stopped)
        print(f"stopped by a check: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    run_dir.set_status("done")
    return 0


def show_prepared(prepared: Prepared, screen: Screen) -> None:
    """Print the plan, and what to know beside it."""
    show_plan(prepared.plan, screen.console)
    for note in prepared.notes:
        screen.say(f"NOTE: {note}")


@contextmanager
def _ending(*last: Callable[[], None]) -> Iterator[None]:
    """Do these after the block. Where the block failed, what the disk refuses then is told: the first error counts."""
    try:
        yield
    except BaseException:
        for each in last:
            _told(each)
        raise
    for each in last:
        each()


def _told(write: Callable[[], None]) -> None:
    """Write; where the disk refuses, say so and go on."""
    try:
        write()
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)


def _set_failed(run_dir: RunDir, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", str(error) or "interrupted from the keyboard")
    elif isinstance(error, HookrunError):
        run_dir.set_status("failed", str(error), error.exit_code)
    else:
        run_dir.set_status("failed", f"{type(error).__name__}: {error}")


def _run(prepared: Prepared, run_dir: RunDir) -> str | None:
    """Run the task under its hooks; returns why a check stopped it, or None."""
    run_dir.write_plan(prepared.plan.to_dict())
    run_dir.write_env(environment(device=str(prepared.device)))
    run_dir.write_model(model_facts(prepared.model))
    settings = prepared.settings
    screen = Screen()
    show_prepared(prepared, screen)
    board = Board(run_dir.path) if settings.task.tensorboard else None
    sink = RunSink(run_dir, screen.say, board)
    model = prepared.model.to(prepared.device)
    scaler = GradScaler(prepared.device.type, enabled=settings.compute.precision == "fp16")
    with (
        closing(board) if board is not None else nullcontext(),
        session(settings.compute, settings.seed),
        Installation(prepared.plan, model, sink=sink, scaler=scaler) as hooks,
    ):
        _load_leftover(prepared, hooks)
        running = Running(prepared, hooks, sink, run_dir, screen)
        # What was recorded before a failure is what explains it.
        with _ending(sink.settle, lambda: run_dir.write_hooks(hook_facts(hooks))):
            _perform(running, scaler)
        stopped = hooks.stopped
        for line in summary(running):
            screen.say(line)
        silent = inactive_lines(hooks)
        if silent and settings.strict and stopped is None:
            raise HookrunError("strict: hooks matched and did nothing\n" + "\n".join(silent))
    return stopped


def _perform(running: Running, scaler: GradScaler) -> None:
    match running.settings.task.name:
        case "train":
            train(running, scaler)
        case "evaluate":
            evaluate(running)
        case "predict":
            predict(running)
        case "export":
            export(running)
        case other:
            raise HookrunError(f"task {other!r} is shown, not run")


def _load_leftover(prepared: Prepared, hooks: Installation) -> None:
    """The values of added parameters that came with `model.weights`."""
    added = dict(hooks.named_parameters())
    for name, tensor in prepared.leftover.items():
        if tensor.shape != added[name].shape:
            shapes = f"{list(tensor.shape)} in the file and {list(added[name].shape)} where its hook adds it"
            hint = "use the hooks that the file was saved with"
            raise SpecError([Problem("model.weights", f"{name} is {shapes}", hint)])
        added[name].data.copy_(tensor)

"""A whole run, from a prepared experiment to its finished directory; read this file first.

ready = prepare(experiment)            hookrun.tasks: model, data, and the plan of the hooks, proven on a copy
execute(ready, path)                   this file: the run directory and its status
    task.execute(ready, run_dir)       under_hooks.py: session, hooks on the model, loggers, resumable states
        task.perform(context)          tasks/train.py, evaluate.py, predict.py, ...: batches through the model
            train(context)             training.py: epochs of steps, validation, checkpoints
                train_step(training)   step.py: forward, backward, clip, check, step, log
    summary(context)                   summaries.py: how often each hook fired, what it changed
hookrun.report                         report.html, made from the directory alone
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.interruptions import code_of, interruption_kept, shielded
from hookrun.ranks.alone import ALONE, Ranks
from hookrun.store.files import StoreError
from hookrun.store.rank_dir import RankDir
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.scores import result
from hookrun.store.states import named_state, newest_state, remove_states, remove_unfinished
from hookrun.tasks.base import Ready
from hookrun.tasks.goals import goal_of
from hookrun.tasks.loop.resuming import require_same

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
    goal = goal_of(ready.experiment)
    buffer = ready.settings.compute.capture_buffer * 2**20
    run_dir = _reopened(ready, path, buffer, anyway=anyway) if go_on else RunDir.create(path, buffer)
    run_dir.ranks = ranks
    with failure_recorded(run_dir), ranks.failures_told():
        run_dir.set_status("running")
        ranks.gathered([str(run_dir.path), None if run_dir.resumed is None else run_dir.resumed.path.name])
        with ending(run_dir.close):
            stopped = ready.task.execute(ready, run_dir)
        ranks.meet()  # the captures of the other ranks are on disk now
        found = None if goal is None else result(open_run(path).metrics, goal).to_dict()
        run_dir.write_manifest()
        with shielded():
            if stopped is None:
                run_dir.set_status("done", objective=found)
            else:
                run_dir.set_status("stopped", stopped)
    if stopped is not None:
        print(f"stopped by a check: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    if not ready.settings.train.checkpoint.keep_done:
        print_failure(partial(remove_states, path))
    return 0


def execute_as_rank(ready: Ready, ranks: Ranks) -> int:
    """Run the task on a rank other than 0, in the directory that rank 0 sends. Returns what `execute` returns."""
    with ranks.failures_told():
        place, state = ranks.gathered(None)[0]
        if place is None:  # another process has just finished the run
            return 0
        saved = None if state is None else named_state(Path(place), state)
        position = None if saved is None else saved.part("files")
        run_dir = RankDir(Path(place), ranks, ready.settings.compute.capture_buffer * 2**20, position)
        run_dir.resumed = saved
        with ending(run_dir.close):
            stopped = ready.task.execute(ready, run_dir)
        ranks.meet()
    return 0 if stopped is None else STOPPED


def _reopened(ready: Ready, path: Path, buffer: int, *, anyway: bool) -> RunDir:
    """The directory of an unfinished run, reset to its newest undamaged state."""
    saved, damaged = newest_state(path)
    for line in damaged.values():
        print(f"{line}; it is ignored", file=sys.stderr, flush=True)
    if saved is None and damaged and not anyway:
        hint = "type resume_anyway=true to start from the beginning and lose the records"
        raise SpecError([Problem("resume", f"{path} has no undamaged state", hint)])
    if saved is not None and not anyway:
        require_same(saved, ready, path)
    if saved is None:
        print(f"no state was saved in {path}: the run starts from the beginning", flush=True)
    run_dir = RunDir.reopen(path, None if saved is None else saved.part("files"), buffer)
    remove_unfinished(path, damaged)
    run_dir.resumed = saved
    return run_dir


@contextmanager
def ending(*last: Callable[[], None]) -> Iterator[None]:
    """Call all of these after the block, even if it raises. After a first error, StoreErrors are only printed."""
    left = list(last)
    try:
        yield
        while left:
            left.pop(0)()
    except BaseException:
        for each in left:
            print_failure(each)
        raise


@contextmanager
def failure_recorded(run_dir: RunDir) -> Iterator[None]:
    """Write an exception of the block to status.json before it is raised, even if several signals arrive."""
    try:
        try:
            with interruption_kept():
                yield
        except BaseException as error:
            _record_failure(run_dir, error)
            raise
    except KeyboardInterrupt as interruption:
        _record_failure(
            run_dir, interruption
        )  # in case a second signal arrived before the first was recorded
        raise


def _record_failure(run_dir: RunDir, error: BaseException) -> None:
    with shielded():
        if not run_dir.ended:
            print_failure(partial(set_failed, run_dir, error))


def print_failure(write: Callable[[], None]) -> None:
    """Call `write`; a StoreError is printed and not raised."""
    try:
        write()
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)


def set_failed(run_dir: RunDir, error: BaseException) -> None:
    """Set the status of the run to that of a failure or an interruption."""
    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", str(error) or "interrupted from the keyboard", code_of(error))
    elif isinstance(error, HookrunError):
        run_dir.set_status("failed", str(error), error.exit_code)
    else:
        run_dir.set_status("failed", f"{type(error).__name__}: {error}")

"""Runs a task in a directory, and leaves there how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.interruptions import code_of, shielded
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


def run_in(
    ready: Ready, path: Path, *, go_on: bool = False, anyway: bool = False, ranks: Ranks = ALONE
) -> int:
    """Run the task in the directory `path`.

    go_on:  the directory is that of a run which did not come to its end: go on from its newest state that is whole;
            where there is none, what it recorded is cleared away and it begins anew
    anyway: go on also where the state is of another configuration, model, data or version
    ranks:  the processes of the run, of which this is rank 0; the others are in `follow_in`

    Returns 0, or 3 if a check with policy `stop` ended the run. Whatever is raised is in status.json before, but for
    a state that is of another run: that is a SpecError, and nothing was touched.
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
        ranks.meet()  # what the others captured is on the disk
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
        told(partial(remove_states, path))
    return 0


def follow_in(ready: Ready, ranks: Ranks) -> int:
    """Run the task beside rank 0, which owns the directory and says where it is; what `run_in` returns."""
    with ranks.failures_told():
        place, state = ranks.gathered(None)[0]
        if place is None:  # another process has just finished it
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
    """The directory of a run that did not come to its end, as it was at its newest state that is whole."""
    saved, damaged = newest_state(path)
    for line in damaged.values():
        print(f"{line}; it is left out", file=sys.stderr, flush=True)
    if saved is None and damaged and not anyway:
        hint = "type resume_anyway=true to begin anew, and lose what was recorded"
        raise SpecError([Problem("resume", f"{path} has no state that is whole", hint)])
    if saved is not None and not anyway:
        require_same(saved, ready, path)
    if saved is None:
        print(f"no state was saved in {path}: the run begins anew", flush=True)
    run_dir = RunDir.reopen(path, None if saved is None else saved.part("files"), buffer)
    remove_unfinished(path, damaged)
    run_dir.resumed = saved
    return run_dir


@contextmanager
def ending(*last: Callable[[], None]) -> Iterator[None]:
    """Do all of these after the block. The first error counts; what the disk refuses after it is told."""
    left = list(last)
    try:
        yield
        while left:
            left.pop(0)()
    except BaseException:
        for each in left:
            told(each)
        raise


@contextmanager
def failure_recorded(run_dir: RunDir) -> Iterator[None]:
    """Whatever is raised in the block is in status.json before, also where signals come one after another."""
    try:
        try:
            yield
        except BaseException as error:
            _record_failure(run_dir, error)
            raise
    except KeyboardInterrupt as interruption:
        _record_failure(run_dir, interruption)  # if a second signal came just before the first was recorded
        raise


def _record_failure(run_dir: RunDir, error: BaseException) -> None:
    with shielded():
        if not run_dir.ended:
            told(partial(set_failed, run_dir, error))


def told(write: Callable[[], None]) -> None:
    """Write; where the disk refuses, say so and go on."""
    try:
        write()
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)


def set_failed(run_dir: RunDir, error: BaseException) -> None:
    """Set the status that an exception leaves."""
    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", str(error) or "interrupted from the keyboard", code_of(error))
    elif isinstance(error, HookrunError):
        run_dir.set_status("failed", str(error), error.exit_code)
    else:
        run_dir.set_status("failed", f"{type(error).__name__}: {error}")

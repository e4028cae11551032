"""A whole run, from a prepared experiment to its finished directory; read this file first.

ready = prepare(experiment)            experiment/prepare.py: model, data, and the plan of the hooks, proven on a copy
execute(ready, path)                   this file: create, open, perform, close
    ready.task.execute(ready, ...)     tasks/under_hooks.py, or a task that needs no model
        run_under_hooks(ready, ...)    passes/open_run.py: session, hooks on the model, loggers, resumable states
            task.perform(context)      tasks/train.py, evaluate.py, predict.py, ...: batches through the model
                train(context)         training/loop.py: epochs of steps, validation, checkpoints
                    train_step(...)    training/step.py: forward, backward, clip, check, step, log
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from hookrun.run.experiment.goal import goal_of
from hookrun.run.experiment.task import Ready
from hookrun.run.passes import directory
from hookrun.run.passes.endings import ending, failure_recorded, print_failure
from hookrun.run.ranks import ALONE, Ranks
from hookrun.signals import shielded
from hookrun.store.format import METRICS
from hookrun.store.objective import Goal
from hookrun.store.records import MetricsLine, read_records
from hookrun.store.run_dir import RunDir
from hookrun.store.scores import result
from hookrun.store.states.files import remove_states

STOPPED = 3


def execute(
    ready: Ready, path: Path, *, resume: bool = False, force: bool = False, ranks: Ranks = ALONE
) -> int:
    """Run the task in the directory `path`.

    resume: go on with the unfinished run in `path`, from its newest undamaged state; without any state, its records
            are deleted and it starts from the beginning
    force:  resume even if the state was saved with another configuration, model, data or version
    ranks:  the processes of the run; this process is rank 0, and the others call `execute_as_rank`

    Returns 0, or 3 if a check with policy `stop` ended the run. An exception is written to status.json before it is
    raised, except a SpecError because the state does not fit: then no file is changed.
    """
    with ranks.failures_told():  # the other ranks wait for the directory
        goal = goal_of(ready.experiment)
        run_dir = directory.reopen(ready, path, force=force) if resume else directory.create(ready, path)
    with failure_recorded(run_dir), ranks.failures_told():
        run_dir.set_status("running")
        directory.share(ready, run_dir, ranks)
        stopped = _perform(ready, run_dir)
        _close(run_dir, goal, stopped)
    if stopped is not None:
        print(f"{ready.task.stopped}: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    if not ready.settings.train.checkpoint.keep_done:
        print_failure(partial(remove_states, path))
    return 0


def execute_as_rank(ready: Ready, ranks: Ranks) -> int:
    """Run the task on a rank other than 0, in the directory that rank 0 sends. Returns what `execute` returns."""
    with ranks.failures_told():
        run_dir = directory.receive(ready, ranks)
        if run_dir is None:
            return 0
        stopped = _perform(ready, run_dir)
    return 0 if stopped is None else STOPPED


def _perform(ready: Ready, run_dir: RunDir) -> str | None:
    """Run the task and wait until every rank's files are there; returns why a check stopped it, or None."""
    with ending(run_dir.close):
        stopped = ready.task.execute(ready, run_dir)
    run_dir.see_ranks(ready.settings.compute.timeout)
    return stopped


def _close(run_dir: RunDir, goal: Goal | None, stopped: str | None) -> None:
    """Write the manifest and the final status, with the value of the objective."""
    objective = None
    if goal is not None and stopped is None:
        objective = result(read_records(run_dir.path / METRICS, MetricsLine), goal).model_dump()
    run_dir.write_manifest()
    with shielded():
        run_dir.set_status("done" if stopped is None else "stopped", stopped or "", objective=objective)

"""One run by several processes: rank 0 does everything a single process does; the other ranks only compute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hookrun.cli.exit_codes import exit_code
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.ranks.alone import ALONE, Ranks, started
from hookrun.spec import Experiment
from hookrun.tasks import Ready, refuse_ranks, task_of


@contextmanager
def ranks_of(experiment: Experiment) -> Iterator[Ranks]:
    """The processes of the run; the process group is joined on entry and left on exit.

    Raises SpecError where torchrun started several and the experiment does not say how to split a run over them.
    """
    compute = experiment.settings.compute
    if compute.strategy == "none":
        refuse_ranks()
        yield ALONE
        return
    me = started()
    if me is None:
        yield ALONE
        return
    task = task_of(experiment)
    if me.size > 1 and not task.splits_batches:
        what = f"found {me.size} processes, and task={task.name} is one for a single process"
        raise SpecError([Problem("task", what, "start it without torchrun")])
    from hookrun.ranks.group import joined
    from hookrun.tasks.loop.session import device_named

    device = device_named(compute.device)
    with joined(me, device.type, compute.timeout) as ranks, ranks.failures_told():
        yield ranks
        if not ranks.failed:  # a rank that dies at its end costs no page
            ranks.meet()


class RefusedByMain(HookrunError):
    """Rank 0 refused the experiment and reports why; this rank ends with the same exit code and prints nothing."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__("refused by rank 0")


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """A block that has to succeed on every rank.

    An error on rank 0 is raised there, and RefusedByMain on the other ranks. If only another rank fails, rank 0 raises
    HookrunError with that rank's message.
    """
    if not ranks.several:
        yield
        return
    failure: HookrunError | None = None
    try:
        yield
    except HookrunError as error:
        failure = error
    outcomes = ranks.gathered(None if failure is None else [str(failure), failure.exit_code])
    if failure is not None and ranks.is_main:
        raise failure
    failed = next(((rank, each) for rank, each in enumerate(outcomes) if each is not None), None)
    if failed is not None:
        rank, (text, code) = failed
        if not ranks.is_main:
            raise RefusedByMain(code)
        raise HookrunError(f"rank {rank} cannot run the experiment, and rank 0 can:\n{text}")


def refuse_needs(*, missing: bool) -> None:
    """Raise SpecError if runs that this run needs are missing: several processes cannot make them."""
    if missing:
        what = "runs that it needs are not there, and each of several processes would make them"
        raise SpecError(
            [Problem("needs", what, "run the same command once without torchrun and compute.strategy")]
        )


def follow(prepared: Ready, ranks: Ranks) -> int:
    """Do the work of a rank other than 0 in a run; returns its exit code."""
    from hookrun.tasks.loop.execute import execute_as_rank

    try:
        return execute_as_rank(prepared, ranks)
    except Exception as error:
        what = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
        print(f"rank {ranks.rank}: {what}", file=sys.stderr, flush=True)
        return exit_code(error)

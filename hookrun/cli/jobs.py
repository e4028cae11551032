"""What Hydra calls in a run directory: a run, or one job of a sweep, in whichever process a launcher chooses."""

from __future__ import annotations

import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hookrun.cli.compose import plain
from hookrun.cli.exit_codes import DONE, REFUSED, exit_code, report
from hookrun.cli.job_directories import refuse_links
from hookrun.cli.job_hash import record_of, without_place, write_job
from hookrun.cli.known_runs import KnownRuns, keep_found_runs
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.interpolations import unguarded
from hookrun.interruptions import handled, pending, shielded
from hookrun.ranks.alone import ALONE, Ranks
from hookrun.report.yaml_files import MULTIRUN
from hookrun.spec import Experiment
from hookrun.spec.objective import Goal
from hookrun.store.format import CHECKPOINTS, JOB, STATUS, State
from hookrun.store.lock import LockedError, sole_writer
from hookrun.trust import read_once

if TYPE_CHECKING:
    from hookrun.cli.typed import Resume
    from hookrun.tasks import Ready

NOT_STARTED = -1
"""What a job returns that does not run because another one failed; no process ends with it."""


PAGE_SECONDS = 10
"""Between two pages of a sweep that is under way."""
_next_page = dict[Path, float]()


class JobFailed(HookrunError):
    """A job of an optimizing sweep failed, with `exit_code`; its sweeper decides whether to go on."""

    def __init__(self, run_dir: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(run_dir, exit_code)  # the arguments that rebuild it in another process

    def __str__(self) -> str:
        return "job failed with exit code {1}: {0}".format(*self.args)


@dataclass(frozen=True)
class SingleRun:
    """A single run: everything was checked and built before its directory was made.

    latest: `outputs/latest` is to point to it, if it is new
    resume: it goes on in its directory; None: it is new
    ranks:  the processes of the run, of which this is rank 0
    """

    prepared: Ready
    latest: bool = True
    resume: Resume | None = None
    ranks: Ranks = ALONE

    def __call__(self, cfg: DictConfig) -> int:
        from hookrun import tasks
        from hookrun.store.run_dir import update_latest

        run_dir = _run_dir()
        go_on, anyway = self.resume is not None, self.resume is not None and self.resume.anyway
        if not go_on:
            if self.latest and (note := update_latest(run_dir)):
                print(note)
            keep_found_runs(run_dir, cfg, self.prepared)
        with unguarded():
            return _attempt(
                run_dir,
                lambda: tasks.run(self.prepared, run_dir, go_on=go_on, anyway=anyway, ranks=self.ranks),
            )


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep. It can be pickled, so that launchers may run it in other processes.

    trust:      the packages that were trusted when the command was entered, whatever the environment says by now
    optimizing: the sweeper wants the objective of each job, and an exception from a failed one
    goal:       the objective that every job must have; None: whichever it has
    runs:       the run of each need, and that before the sweep
    go_on:      the sweep's directory holds jobs already
    begun:      the directories of these jobs, within the sweep's: there a run goes on
    anyway:     also where its state is of another model, data or version
    stop:       a file that a failed job makes, and that lets no other job start; None: the others run
    """

    trust: frozenset[str]
    optimizing: bool = False
    goal: Goal | None = None
    runs: KnownRuns = field(default_factory=KnownRuns)
    go_on: bool = False
    begun: frozenset[str] = frozenset()
    anyway: bool = False
    stop: Path | None = None

    def __call__(self, cfg: DictConfig) -> int | float:
        """The exit code, or the objective."""
        with handled():  # in the process of another launcher too
            return self._returned(cfg)

    def _returned(self, cfg: DictConfig) -> int | float:
        if (signal := pending()) is not None:  # whoever was to raise it was kept from it
            raise signal
        if self.stop is not None and self.stop.exists():
            return NOT_STARTED
        run_dir = _run_dir()
        try:
            with read_once(self.trust):
                code = self._alone(cfg, run_dir)
        finally:
            release_memory()
        if code != DONE and self.stop is not None:
            self.stop.touch()  # before the page, which takes its time: no other process is to start a job meanwhile
        renew_page(_sweep_dir(), run_dir)
        if not self.optimizing:
            return code
        if code != DONE:
            raise JobFailed(str(run_dir), code)
        from hookrun import tasks

        return tasks.objective(run_dir)

    def _alone(self, cfg: DictConfig, run_dir: Path) -> int:
        """The exit code of the job, which is the only one to write into its directory.

        The sweep that started it may have been killed while the job went on in another process.
        """
        sweep_dir = _sweep_dir()
        name = os.path.relpath(run_dir, sweep_dir)
        try:
            if self.go_on:
                refuse_links(sweep_dir, name)  # before anything is written, in this process too
            with sole_writer(run_dir, within=sweep_dir):
                is_begun = name in self.begun and (run_dir / STATUS).exists()
                return _attempt(run_dir, lambda: self._run(cfg, run_dir, is_begun))
        except (LockedError, SpecError) as error:
            report(error)
            return REFUSED

    def _run(self, cfg: DictConfig, run_dir: Path, go_on: bool) -> int:
        from hookrun import tasks

        found, is_own = None, False
        if not go_on:
            if self.go_on and (run_dir / STATUS).exists():
                what = f"{run_dir} holds a run that was not there when the sweep began"
                raise SpecError(
                    [Problem("hydra.sweep.subdir", what, "wait until it has ended, and try again")]
                )
            found, is_own = without_place(cfg, HydraConfig.get())
            write_job(run_dir, record_of(found))
        try:
            config = found if found is not None and is_own else plain(cfg)
            experiment = self.runs.of(tasks.parse_experiment(config)).of_a_sweep()
            if self.goal is not None:
                require_goal(experiment, self.goal)
            prepared = tasks.prepare(experiment, trust=self.trust)
            keep_found_runs(run_dir, cfg, prepared)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            from hookrun.store.run_dir import RunDir

            status: State = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            run = RunDir(run_dir) if go_on else RunDir.create(run_dir)
            with shielded():
                run.set_status(status, str(error) or type(error).__name__, exit_code(error))
            raise
        return tasks.run(prepared, run_dir, go_on=go_on, anyway=self.anyway)


def require_goal(experiment: Experiment, goal: Goal) -> None:
    """Refuse a job whose objective is not the sweep's: their values could not be compared. Raises SpecError."""
    from hookrun import tasks

    if (own := tasks.required_goal(experiment)) != goal:
        what = f"this job is to {own}, and the sweep is to {goal}"
        raise SpecError([Problem("objective", what, "name an objective that every job has")])


def _run_dir() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


def _sweep_dir() -> Path:
    """Absolute; with `hydra.job.chdir` the job is in another directory by now."""
    hydra = HydraConfig.get()
    return Path(os.path.normpath(os.path.join(hydra.runtime.cwd, hydra.sweep.dir)))


def _attempt(run_dir: Path, run: Callable[[], int]) -> int:
    """The exit code of `run`; a failure is reported and not raised, so that a sweep goes on."""
    before = _status(run_dir)
    try:
        return run()
    except KeyboardInterrupt as interruption:
        print(f"{str(interruption) or 'interrupted'}\nrun directory: {run_dir}", file=sys.stderr, flush=True)
        _tell_how_to_go_on(run_dir)
        raise
    except (Exception, SystemExit) as error:
        report(error, run_dir)
        _tell_how_to_go_on(run_dir)
        return exit_code(error)
    finally:
        if _status(run_dir) != before:  # else nothing has run there
            make_page(run_dir)


def _status(run_dir: Path) -> bytes | None:
    """What status.json holds; None where there is none."""
    try:
        return (run_dir / STATUS).read_bytes()
    except OSError:
        return None


def _tell_how_to_go_on(run_dir: Path) -> None:
    """Where a state of the run was saved, the command that goes on from it; for a job it is that of its sweep."""
    if any((run_dir / CHECKPOINTS).glob("state_*/state.json")):
        sweep = next((folder for folder in run_dir.parents if (folder / MULTIRUN).is_file()), None)
        if sweep is not None and (run_dir / JOB).exists():
            typed, folder = "-m resume", sweep
        else:
            typed, folder = "resume", run_dir
        place = os.path.relpath(folder)
        place = str(folder) if place.startswith("..") else place
        print(f"to go on: hookrun {typed}={shlex.quote(place)}", file=sys.stderr, flush=True)


def make_page(folder: Path) -> None:
    """Write the report of a run or of a sweep and print its path; if that fails, the run is not affected."""
    from hookrun.report import write_report

    try:
        print(f"report: {write_report(folder)}", flush=True)
    except Exception as error:  # the run is over and its exit code known, whatever fails in the report
        what = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
        again = f"python -m hookrun.report {folder}"
        print(f"report: not made: {what}\n  once that is mended: {again}", file=sys.stderr, flush=True)


def renew_page(sweep_dir: Path, run_dir: Path) -> None:
    """Write the page of a sweep that is under way, unless that was done a short while ago. The last one is not quiet.

    run_dir: that of the job that is just over

    Reading thousands of jobs takes its time: at most a fiftieth of a sweep's goes into its pages.
    """
    from hookrun.report import write_report
    from hookrun.report.jobs import keep_job

    with suppress(Exception):  # as below
        keep_job(sweep_dir, run_dir)
    now = time.monotonic()
    if now < _next_page.get(sweep_dir, 0.0):
        return

    with suppress(Exception):  # a job is not in danger for a page: what is wrong is told of the last page
        write_report(sweep_dir)
    _next_page[sweep_dir] = time.monotonic() + max(PAGE_SECONDS, 50 * (time.monotonic() - now))


class _Settled:
    """Whether a sweep is under way whose first job is not over."""

    awaits_first = False


_settled = _Settled()


@contextmanager
def settled_memory() -> Iterator[None]:
    """Python's collector leaves alone what is there before: all modules, which it would look through again."""
    if gc.get_freeze_count():  # whoever calls has done so already
        yield
        return
    gc.collect()
    gc.freeze()
    _settled.awaits_first = True
    try:
        yield
    finally:
        _settled.awaits_first = False
        gc.unfreeze()


def release_memory() -> None:
    """Free what the last job of this process held in memory, before the next one starts.

    What is left after the first job of a sweep are modules that it was the first to need, and what they remember:
    within `settled_memory` the collector leaves that alone, too.
    """
    gc.collect()
    if _settled.awaits_first:
        _settled.awaits_first = False
        gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

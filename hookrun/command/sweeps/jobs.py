"""The callables that Hydra calls in a run directory: a single run, or one job of a sweep in any launcher's process."""

from __future__ import annotations

import copy
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.compose import plain
from hookrun.command.compose.given import given_in, resuming_call
from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.composed_jobs import hash_of
from hookrun.command.sweeps.exit_codes import DONE, FAILED, REFUSED, exit_code, report
from hookrun.command.sweeps.resumed import refuse_links
from hookrun.engine.collector import collector_paused
from hookrun.engine.keys import key_of
from hookrun.engine.trust import read_once
from hookrun.errors import HookrunError, SpecError, spec_error
from hookrun.report.sweep_facts import record_in
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Need
from hookrun.run.ranks import ALONE, Ranks
from hookrun.signals import handled, interruption_kept, pending, shielded
from hookrun.store.config.interpolations import literal, unguarded
from hookrun.store.config.stored import read_yaml
from hookrun.store.files import StoreError, replacing, write_json
from hookrun.store.format import CHECKPOINTS, CONFIG, JOB, MULTIRUN, REPORT, STATUS, State
from hookrun.store.lock import LockedError, sole_writer
from hookrun.store.objective import Goal
from hookrun.store.records import Status
from hookrun.terminal import waiting_for, words

if TYPE_CHECKING:
    from hookrun.command.compose.overrides import Resume
    from hookrun.run.tasks import Ready

NOT_STARTED = -1
"""The return value of a job that does not start because another job failed; it is never an exit code."""


PAGE_SECONDS = 10
"""The least time between two pages of a running sweep."""
_next_page: dict[Path, float] = {}


class JobFailed(HookrunError):
    """A run that others wait for ended with `exit_code`: a need, or a job by whose value a sweeper chooses the next."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        # Pickle calls the class with the message alone, and then sets this again.
        self.exit_code = exit_code


def run_alone(
    cfg: DictConfig,
    prepared: Ready,
    *,
    latest: bool = True,
    resume: Resume | None = None,
    ranks: Ranks = ALONE,
    outcome: Outcome | None = None,
) -> int:
    """The exit code of a single run, checked and built before its directory was created.

    latest: whether the link `latest` beside a new run in the folder of outputs is set to it
    resume: what was typed to resume the run; None for a new run
    ranks:  the processes of the run, of which this is rank 0
    outcome: gets the error that ends the run
    """
    from hookrun.run.execute import execute
    from hookrun.store.run_dir import outputs_folder, update_latest

    run_dir = _run_dir()
    is_resumed = resume is not None
    force = resume is not None and resume.force
    if not is_resumed:
        in_outputs = Path(run_dir).parent.resolve().is_relative_to(outputs_folder().resolve())
        if latest and in_outputs and (note := update_latest(run_dir)):
            print(note)
        keep_found_runs(run_dir, cfg, prepared)
    with unguarded():
        return _attempt(
            run_dir,
            lambda: execute(prepared, run_dir, resume=is_resumed, force=force, ranks=ranks),
            outcome=outcome,
        )


@dataclass
class JobLines:
    """The lines that a sweep prints, one for each job: ``[12/56] vars.layer=0  loss 1.25  0.1 s  (40 s left)``.

    swept: the swept keys
    total: the number of jobs; None where the sweeper chooses them while it runs
    told:  what the jobs of this process have printed, see `hookrun.run.passes.progress.one_of_many`
    """

    swept: frozenset[str]
    total: int | None = None
    told: set[str] = field(default_factory=set)
    _ended: int = 0
    _seconds: float = 0.0

    def end(self, run_dir: Path, seconds: float) -> None:
        """Print the line of a job that took this time."""
        from hookrun.run.passes.progress import numbers

        hydra = HydraConfig.get()
        number = int(hydra.job.num) + 1
        settings = [
            text
            for text in map(str, hydra.overrides.task)
            if key_of(text) in self.swept or text == "hooked=false"
        ]
        status = record_in(run_dir / STATUS, Status)  # if somebody has damaged it, the sweep goes on
        result = status.get("objective") or {}
        ended = str(status.get("status", "not started"))
        # in a resumed sweep the numbers may go beyond its jobs
        of = "" if self.total is None or number > self.total else f"/{self.total}"
        parts = [f"[{number}{of}] {' '.join(settings)}".rstrip()]
        if ended != "done":
            parts.append(ended)
        elif result.get("value") is not None:
            parts.append(numbers({result["metric"].rpartition("/")[2]: result["value"]}))
        parts.append(f"{seconds:.1f} s")
        self._ended += 1
        self._seconds += seconds
        if self.total is not None and self._ended == number < self.total:  # the jobs run one after the other
            left = self._seconds / number * (self.total - number)
            parts.append(f"({left:.0f} s left)" if left < 120 else f"({left / 60:.0f} min left)")
        print("  ".join(parts), flush=True)


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep. It can be pickled, so that launchers may run it in other processes.

    trust:      the packages that were trusted when the command was entered, also if the environment changes later
    goal:       the objective that every job must have: the sweeper gets its value, or an exception from a failed job;
                None: each job may have its own
    needs:      need -> the directory of its run
    previous:   the directory of the run before the sweep; None: no experiment refers to it
    begun:      of a resumed sweep, the directories of the jobs in it, relative to its own; None for a new sweep
    force:      whether they are resumed even if their state is of another model, data or version
    stop:       a file that a failed job creates and that keeps other jobs from starting; None: the others run
    lines:      prints a line for the job; None: the job prints all that a single run prints
    """

    trust: frozenset[str]
    goal: Goal | None = None
    needs: Mapping[Need, str | None] = field(default_factory=dict)
    previous: str | None = None
    begun: frozenset[str] | None = None
    force: bool = False
    stop: Path | None = None
    lines: JobLines | None = None

    def __call__(self, cfg: DictConfig) -> int | float:
        """The exit code, or the objective."""
        with words(), handled():  # needed in the processes of other launchers too
            if (signal := pending()) is not None:  # a signal that arrived where it could not be raised
                raise signal
            if self.stop is not None and self.stop.exists():
                return NOT_STARTED
            from hookrun.run.passes.progress import one_of_many

            run_dir = _run_dir()
            sweep_dir = _sweep_dir()
            start = time.monotonic()
            screen = nullcontext() if self.lines is None else one_of_many(self.lines.told)
            try:
                with read_once(self.trust), screen:
                    code = self._alone(cfg, run_dir, sweep_dir)
            finally:
                free_job_memory()
            if self.lines is not None:
                self.lines.end(run_dir, time.monotonic() - start)
            if code != DONE and self.stop is not None:
                self.stop.touch()  # before the page, which takes time: no other process must start a job meanwhile
            renew_page(sweep_dir)
        return self.value(run_dir, code)

    def value(self, run_dir: Path, code: int) -> int | float:
        """What the sweeper gets for a job that ended with this exit code: the code, or the objective.

        Raises HookrunError for a job without the objective.
        """
        if self.goal is None:
            return code
        if code != DONE:
            raise JobFailed(f"job failed with exit code {code}: {run_dir}", code)
        from hookrun.run import tasks

        return tasks.objective(run_dir)

    def _alone(self, cfg: DictConfig, run_dir: Path, sweep_dir: Path) -> int:
        """Run the job with its directory locked; returns its exit code.

        The lock is needed where an earlier sweep was killed while its job still runs in another process.
        """
        name = os.path.relpath(run_dir, sweep_dir)
        try:
            if self.begun is not None:
                refuse_links(sweep_dir, name)  # before anything is written, in this process too
            with sole_writer(run_dir, within=sweep_dir):
                is_begun = name in (self.begun or ()) and (run_dir / STATUS).exists()
                return _attempt(
                    run_dir, lambda: self._run(cfg, run_dir, is_begun), says_page=self.lines is None
                )
        except (LockedError, SpecError) as error:
            report(error)
            return REFUSED

    def _run(self, cfg: DictConfig, run_dir: Path, resume: bool) -> int:
        from hookrun.run import tasks

        if not resume:
            if self.begun is not None and (run_dir / STATUS).exists():
                raise spec_error(
                    "hydra.sweep.subdir",
                    f"{run_dir} holds a run that was not there when the sweep began",
                    "wait until it has ended, and try again",
                )
            write_json(run_dir / JOB, {"config": hash_of(cfg)}, flushes_folder=False)  # the status flushes it
        from hookrun.run.passes.endings import in_this_process

        try:
            with interruption_kept():
                experiment = (
                    tasks.parse_experiment(plain(cfg)).with_runs(self.needs, self.previous).of_a_sweep()
                )
                if self.goal is not None:
                    require_goal(experiment, self.goal)
                with in_this_process():
                    prepared = tasks.prepare(experiment, trust=self.trust)
                keep_found_runs(run_dir, cfg, prepared)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            from hookrun.store.run_dir import RunDir

            status: State = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            run = RunDir(run_dir) if resume else RunDir.create(run_dir)
            with shielded():
                run.set_status(status, str(error) or type(error).__name__, exit_code(error))
            raise
        from hookrun.run.execute import execute

        return execute(prepared, run_dir, resume=resume, force=self.force)


def require_goal(experiment: Experiment, goal: Goal) -> None:
    """Raise SpecError for a job whose objective is not the sweep's, since their values could not be compared."""
    from hookrun.run import tasks

    if (own := tasks.required_goal(experiment)) != goal:
        raise spec_error(
            "objective",
            f"this job is to {own}, and the sweep is to {goal}",
            "name an objective that every job has",
        )


def keep_found_runs(run_dir: Path, cfg: DictConfig, prepared: Ready) -> None:
    """Rewrite the stored configuration with the directories that names such as `outputs/latest` stood for.

    cfg: the configuration of the run
    """
    places = {
        run.where: run.path for run in prepared.runs if not run.need and os.path.abspath(run.run) != run.path
    }
    weights = prepared.settings.model.own_weights
    source = getattr(prepared, "weights", "")
    if (
        weights is not None
        and os.path.isabs(source)
        and os.path.abspath(Path(weights).expanduser()) != source
    ):
        places["model.weights"] = source
    stored = run_dir / CONFIG
    if not places or not stored.is_file():
        return
    config = copy.deepcopy(cfg)
    with read_write(config), open_dict(config):
        for where, path in places.items():
            OmegaConf.update(config, where, literal(path), force_add=True)
    with replacing(stored) as file:
        file.write(OmegaConf.to_yaml(config).encode())


def import_torch() -> None:
    """Import torch, which takes most of the time before a run starts; the progress line says so meanwhile."""
    if "torch" in sys.modules:
        return
    waiting_for("importing torch")
    with collector_paused():
        import torch  # noqa: F401

        gc.freeze()  # half a second: almost nothing that an import creates can be freed


def free_job_memory() -> None:
    """Free the memory of the last job of this process, before the next job starts."""
    gc.collect()
    torch = sys.modules.get("torch")
    empty_cache = None if torch is None else getattr(torch.get_device_module(), "empty_cache", None)
    if empty_cache is not None:  # the CPU has none
        empty_cache()


def _run_dir() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


def _sweep_dir() -> Path:
    """The absolute path of the sweep's directory: with `hydra.job.chdir` the working directory is another one."""
    hydra = HydraConfig.get()
    plain = cast(Any, OmegaConf.to_container(hydra.runtime, resolve=False))  # a folder may be called ${x}
    return Path(os.path.normpath(os.path.join(plain["cwd"], hydra.sweep.dir)))


def _attempt(
    run_dir: Path, run: Callable[[], int], *, says_page: bool = True, outcome: Outcome | None = None
) -> int:
    """The exit code of `run`; a failure is reported but not raised, so that the sweep continues.

    outcome: gets the failure
    """
    before = _status(run_dir)
    try:
        return run()
    except KeyboardInterrupt as interruption:
        print(f"{str(interruption) or 'interrupted'}\nrun directory: {run_dir}", file=sys.stderr, flush=True)
        _tell_how_to_go_on(run_dir)
        raise
    except (Exception, SystemExit) as error:
        if outcome is not None:
            outcome.errors.append(error)
        report(error, run_dir, prints=outcome is None or not outcome.from_python)
        if _status(run_dir) != before:  # otherwise the same command would be refused again
            _tell_how_to_go_on(run_dir)
        return exit_code(error)
    finally:
        if _status(run_dir) != before:  # otherwise no run was started there
            make_page(run_dir, says=says_page)


def near_path(path: Path) -> str:
    """The path relative to the current directory if it is below it; else the path itself."""
    place = os.path.relpath(path)
    return str(path) if place.startswith("..") else place


def _status(run_dir: Path) -> bytes | None:
    """The content of status.json; None where the file does not exist."""
    try:
        return (run_dir / STATUS).read_bytes()
    except OSError:
        return None


def _tell_how_to_go_on(run_dir: Path) -> None:
    """If the run saved a state, print the command that resumes the run, or for a job the command for its sweep."""
    if any((run_dir / CHECKPOINTS).glob("state_*/state.json")):
        sweep = next((folder for folder in run_dir.parents if (folder / MULTIRUN).is_file()), None)
        typed = "resume"
        folder = run_dir
        if sweep is not None and (run_dir / JOB).exists():
            typed = "-m resume"
            folder = sweep
        command = f"hookrun {typed}={shlex.quote(near_path(folder))}"
        with suppress(StoreError):  # of a configuration that was damaged meanwhile
            if given := given_in(read_yaml(run_dir / CONFIG, run_dir)):
                command = resuming_call(given, Path(near_path(folder)))
        print(f"to go on: {command}", file=sys.stderr, flush=True)


def make_page(folder: Path, *, says: bool = True) -> None:
    """Write the report of a run or of a sweep and print its path; if that fails, the run is not affected."""
    from hookrun.report import try_report

    if (page := try_report(folder)) is not None and says:
        print(f"report: {page}", flush=True)


def make_missing_page(run_dir: Path) -> None:
    """Write the report of a finished run that was killed before it wrote the report itself."""
    if lacks_page(run_dir):
        make_page(run_dir)


def lacks_page(run_dir: Path) -> bool:
    """Whether a finished run has no report, or one that was written before it ended."""
    page = run_dir / REPORT
    return not page.exists() or page.stat().st_mtime_ns < (run_dir / STATUS).stat().st_mtime_ns


def renew_page(sweep_dir: Path) -> None:
    """Write the page of a running sweep without printing anything, unless the page was written a short while ago.

    Reading thousands of jobs takes time: at most a fiftieth of a sweep's time is spent on its pages.
    """
    from hookrun.report import write_report
    from hookrun.report.index import indexed_above, write_index

    now = time.monotonic()
    if now < _next_page.get(sweep_dir, 0.0):
        return

    with suppress(Exception):  # `make_page` reports the error at the end of the sweep
        for folder in indexed_above(write_report(sweep_dir).parent):
            write_index(folder)
    _next_page[sweep_dir] = time.monotonic() + max(PAGE_SECONDS, 50 * (time.monotonic() - now))

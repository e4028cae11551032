"""Sweeps: every job is composed and validated before the first one runs; if a job fails, the others still run."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from hookrun.command.compose.compose import JOB_DIRECTORY, claimed, parsed, plain_run, refuse_used
from hookrun.command.compose.errors import explained
from hookrun.command.compose.hydra import App, numbered
from hookrun.command.compose.overrides import RESUME, Resume
from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.composed_jobs import (
    SUBDIR,
    ComposedJob,
    command_of,
    hash_with,
    jobs_of,
    made_of,
)
from hookrun.command.sweeps.exit_codes import DONE, FAILED, most_serious
from hookrun.command.sweeps.jobs import (
    JobFailed,
    JobLines,
    SweepJob,
    free_job_memory,
    import_torch,
    lacks_page,
    make_page,
)
from hookrun.command.sweeps.launching import SweepRun, SweepStopped, interrupted
from hookrun.command.sweeps.needs import NeededRuns
from hookrun.command.sweeps.resumed import SWEEPS, JobDirectories
from hookrun.engine.keys import key_of, root_of
from hookrun.errors import (
    CompileError,
    HookrunError,
    Problem,
    SpecError,
    counted,
    listed,
    nearest,
    reason,
    refuse,
    spec_error,
)
from hookrun.report.sweep_facts import SweepData, conclusion, find_jobs, record_in
from hookrun.run import tasks
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.ranks import is_main, size_of_world
from hookrun.run.tasks import JobCache, refuse_ranks, required_goal, task_of
from hookrun.store.files import os_errors, replacing, write_json
from hookrun.store.format import MULTIRUN, REPORT, STATUS, SWEEP, entries
from hookrun.store.objective import Goal
from hookrun.store.records import SweepRecord
from hookrun.store.run_dir import outputs_folder, update_latest
from hookrun.terminal import noted

STOP = ".stop"
"""A file in the directory of a sweep with `fail_fast`: a job failed, and no other job may start."""

FINISHED = ".finished.json"
"""A file in the directory of a sweep whose jobs have all ended with exit code 0; removed when it is started again."""

SECONDS = 60
"""No fake run starts after this time."""

_COMPILED = frozenset({"hooks", "model", "data", "task", "experiment"})
"""The root keys that may make the jobs of a sweep compile differently."""

MOST_REFUSED = 100
"""The number of invalid jobs after which no further job is validated."""

MOST_PROBLEMS = 20
MOST_JOBS = 3
"""The most further jobs that are named for one problem."""

_FAILURES = "max_failure_rate"


@dataclass(frozen=True)
class SweepCommand:
    """A sweep that was typed.

    cfg:       its configuration, as Hydra composed it
    trust:     the packages that a user's own code may come from
    is_plan:   whether ``task=plan`` was typed: the plan of every job is printed
    resume:    what was typed to go on with an earlier sweep; None for a new one
    fail_fast: whether no job starts after one has failed
    verbose:   whether jobs print all that a single run prints, and not one line each
    outcome:   is filled with what was done
    """

    app: App
    cfg: DictConfig
    trust: frozenset[str]
    is_plan: bool = False
    resume: Resume | None = None
    fail_fast: bool = False
    verbose: bool = False
    outcome: Outcome = field(default_factory=Outcome)


def sweep(command: SweepCommand) -> int:
    """Run the jobs of a sweep, or show their plans; returns the most serious of their exit codes.

    Raises SpecError, before anything is written, if a job does not compose or validate. A sweeper that chooses
    its jobs while it runs cannot list them: only their common configuration is checked then.
    """
    run = plan_jobs(command)
    if run is None:
        return DONE
    if shown := check_jobs(run):
        return _show(run, shown, command.outcome)
    command.outcome.sweep_dir = run.sweep_dir
    return launch(run)


# ---- the jobs ------------------------------------------------------------------------------------------------------


def plan_jobs(command: SweepCommand) -> SweepRun | None:
    """The sweep with its jobs, each composed once, and with their directories if it is resumed.

    None for one that has ended in its directory with nothing left to do, which is printed. Raises SpecError.
    """
    app = command.app
    cfg = command.cfg
    composition = command_of(app, cfg, [])
    with explained(composition):
        # Resolve the time in the directory's name once, so that it is the same for every job.
        HydraConfig.instance().set_config(cfg)
        sweep_dir = Path(os.path.abspath(str(cfg.hydra.sweep.dir)))
        # Sweepers and launchers resolve their settings later, outside `explained`: find mistakes now.
        OmegaConf.to_container(cfg.hydra.sweeper, resolve=True)
        OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
        named = app.jobs(cfg)
    refuse(_set_twice(app, cfg))
    swept = frozenset(key_of(each.get_key_element()) for each in app.swept(cfg) if each.is_sweep_override())
    earlier = None if command.resume is None else JobDirectories(sweep_dir)
    job = SweepJob(
        command.trust,
        begun=None if earlier is None else frozenset(earlier.jobs),
        force=command.resume is not None and command.resume.force,
        stop=sweep_dir / STOP if command.fail_fast else None,
        lines=None if command.verbose else JobLines(swept),
    )
    needs = NeededRuns(composition, command.trust)
    run = SweepRun(app, cfg, sweep_dir, job, earlier, needs=needs, is_plan=command.is_plan)
    if named is None:
        return run
    if not named:
        raise SpecError(_why_no_job(app, cfg))
    run.made_of = made_of(app, cfg, named)
    if earlier is not None and _has_finished(run, earlier):
        count = len(earlier.jobs)
        print(f"sweep: {count} of {count} jobs done, {count} of them before, in {sweep_dir}")
        print(f"report: {sweep_dir / REPORT}")
        command.outcome.sweep_dir = sweep_dir
        return None
    run.jobs = jobs_of(app, cfg, named, MOST_REFUSED)
    if earlier is not None:
        earlier.place(run.jobs)
    if job.lines is not None:
        job.lines.total = len(run.jobs)
    return run


def _has_finished(run: SweepRun, earlier: JobDirectories) -> bool:
    """Whether the same sweep has ended in its directory and nothing is left to do; no job is composed for that."""
    if not run.made_of or not (run.sweep_dir / REPORT).exists():
        return False
    record = record_in(run.sweep_dir / FINISHED, SweepRecord)
    if record.get("finished") != hash_with(run.made_of, [config for config, _ in earlier.jobs.values()]):
        return False
    return all(
        code == DONE and not lacks_page(run.sweep_dir / name) for name, (_, code) in earlier.jobs.items()
    )


def _compile_differently(run: SweepRun) -> bool:
    """Whether the swept keys may change the names or shapes of the hooks."""
    for override in run.app.swept(run.cfg):
        if override.is_sweep_override() and root_of(override.key_or_group) in _COMPILED:
            return True
    return False


# ---- before the first job ------------------------------------------------------------------------------------------


def check_jobs(run: SweepRun) -> Mapping[int, Experiment]:
    """Check the jobs as far as possible before the first of them runs, and find the runs that they need.

    Returns the experiments whose plans are only to be shown, by number; none of a sweep that is to be launched. Raises
    SpecError, or CompileError where nothing else is wrong, with the problems of all jobs.
    """
    if run.jobs is None:
        return _check_common(run)
    experiments, refused, shows = _validated(run, run.jobs)
    if not shows:
        _refuse_ranks(experiments.values())
    elif not is_main():
        return experiments
    if refused and not _compile_differently(run):
        experiments = {}  # report the problems now, before torch is imported
    experiments = _with_runs(run, experiments, shows=shows)
    if not experiments and not refused:
        return {}
    if experiments:
        import_torch()
    message = _check(experiments, run.jobs, refused, run.job.trust)
    if shows:
        return experiments
    print(message, flush=True)
    return {}


def _with_runs(run: SweepRun, experiments: Mapping[int, Experiment], *, shows: bool) -> dict[int, Experiment]:
    """The experiments with the runs that exist already; needs that have not been run yet are compiled."""
    run.needs.find_all(experiments.values(), outputs_folder())
    run.needs.prepare(shows=shows)
    return {number: run.needs.given_to(each) for number, each in experiments.items()}


def _validated(
    run: SweepRun, jobs: Sequence[ComposedJob]
) -> tuple[dict[int, Experiment], dict[int, SpecError], bool]:
    """The experiment of each valid job, the error of each invalid job, and whether all valid jobs are only shown.

    Stops after MOST_REFUSED invalid jobs. A job that has finished is left out: it does not run again.
    """
    experiments: dict[int, Experiment] = {}
    run_dirs: dict[Path, int] = {}
    shown = set[int]()
    refused = {number: job.error for number, job in enumerate(jobs) if job.error is not None}
    for number, composed in enumerate(jobs):
        if composed.exit_code is not None or not composed.config:
            continue
        try:
            job = composed.configuration()
            experiment = parsed(job, plain_run(job, *JOB_DIRECTORY), is_plan=run.is_plan)
            if run.is_plan or task_of(experiment).shows:
                shown.add(number)
            else:
                composed.run_dir = Path(job.hydra.runtime.output_dir)
                if composed.name is None:
                    refuse_used(composed.run_dir, "hydra.sweep.dir")
                first = run_dirs.setdefault(composed.run_dir, number)
                _refuse_directory(composed.run_dir, job, run.sweep_dir, number, first)
        except SpecError as error:
            refused[number] = error
            if len(refused) >= MOST_REFUSED:
                break
            continue
        experiments[number] = experiment
    if shown >= experiments.keys():
        return experiments, refused, True
    for number in shown:
        what = "this job only prints, and other jobs are run"
        refused[number] = spec_error("task", what, "make two sweeps of it")
        del experiments[number]
    return experiments, refused, False


def _refuse_ranks(experiments: Iterable[Experiment]) -> None:
    """Raise SpecError where the process is one of several ranks: a sweep runs in one process."""
    if all(each.settings.compute.strategy == "none" for each in experiments):
        refuse_ranks()
    elif (size := size_of_world()) > 1:
        raise spec_error(
            "-m",
            f"found {size} processes (WORLD_SIZE), and a sweep runs its jobs one after the other in one: a rank "
            "that failed in one job would end all later jobs too",
            "start each job with its own torchrun, or the sweep without torchrun",
        )


def _check_common(run: SweepRun) -> Mapping[int, Experiment]:
    """Check what is common to the jobs of a sweeper that chooses them by their objective; each job is checked later.

    Sets the objective of the jobs. Returns the common experiment if its plan is only to be shown.
    """
    cfg = run.cfg
    if cfg.get("baseline") is True:
        raise spec_error(
            "baseline",
            "the sweeper of this sweep chooses its jobs as it goes, and a baseline is not one that it would choose",
            "run it beside the sweep: hooked=false, without -m",
        )
    job = numbered(copy.deepcopy(cfg), 0)
    experiment = parsed(job, plain_run(job, *JOB_DIRECTORY), is_plan=run.is_plan)
    shows = run.is_plan or task_of(experiment).shows
    if not shows:
        _refuse_ranks([experiment])
    elif not is_main():
        return {0: experiment}
    experiments = _with_runs(run, {0: experiment}, shows=shows)
    if shows:
        return experiments
    goal = required_goal(experiment)
    message = set_direction(cfg, goal)
    if not _compile_differently(run):  # else the jobs' own values decide whether they compile
        tasks.prepare(experiments[0], trust=run.job.trust, cache=JobCache(SECONDS))
    print(message, flush=True)
    prepare_sweeper(cfg, experiment.settings.seed)
    run.job = replace(run.job, goal=goal)
    return {}


def set_direction(cfg: DictConfig, goal: Goal) -> str:
    """Set the direction of optuna's sweeper unless it is set; returns a message.

    Raises SpecError where the sweeper was set to another direction, or to several objectives.
    """
    sweeper = cfg.hydra.sweeper
    where = "hydra.sweeper.direction"
    value = sweeper.get("direction")
    message = f"objective: {goal}"
    if value is None:
        kind = str(sweeper.get("_target_", "")).rpartition(".")[2]
        note = f"{kind} has no setting that says which direction is better, as far as hookrun knows: "
        note += f"it gets the value unchanged. Make sure that it is set to {goal.direction}"
        message += f"\n{noted(note)}"
    elif OmegaConf.is_list(value):
        what = f"found {OmegaConf.to_container(value)}, and a run has one objective, {goal.metric}"
        raise spec_error(where, what, "leave it out: hookrun sets it by `objective`")
    elif isinstance(value, Enum):  # the plugin's default
        with read_write(sweeper), open_dict(sweeper):
            sweeper.direction = goal.direction
    elif value.lower() != goal.direction:
        what = f"found {value.lower()!r}, and the objective is to {goal.direction} {goal.metric}"
        other = "minimize" if goal.direction == "maximize" else "maximize"
        hint = f"leave one of them out; to {other} it, objective.direction={other}"
        of_goal = f"is {goal.direction!r} for {goal.metric}, and {where} is not"
        raise SpecError([Problem(where, what, hint), Problem("objective.direction", of_goal)])
    return message


def prepare_sweeper(cfg: DictConfig, seed: int) -> None:
    """Give the sweeper the defaults of a sweep by hookrun.

    A sweep goes on after failed jobs, unless a failure rate was typed. A sampler without a seed gets the experiment's,
    so that a resumed sweep chooses the same jobs again: those that have finished return their stored values.
    """
    sweeper = cfg.hydra.sweeper
    is_typed = any(key_of(text) == f"hydra.sweeper.{_FAILURES}" for text in cfg.hydra.overrides.hydra)
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        if sweeper.get(_FAILURES) == 0 and not is_typed:
            sweeper[_FAILURES] = 1.0
        sampler = sweeper.get("sampler")
        if OmegaConf.is_dict(sampler) and sampler.get("seed", 0) is None:
            sampler.seed = seed % 2**32  # what NumPy's generators take


def _check(
    experiments: Mapping[int, Experiment],
    jobs: Sequence[ComposedJob],
    refused: Mapping[int, SpecError],
    trust: frozenset[str],
) -> str:
    """Check the valid jobs; returns a message that says what was checked.

    experiments: job index -> experiment of each valid job
    jobs:        every job
    refused:     job index -> error of each invalid job
    """
    cache = JobCache(SECONDS)
    errors = {**refused, **tasks.check_jobs(experiments, cache, trust=trust)}
    free_job_memory()
    if errors:
        is_spec = any(isinstance(error, SpecError) for error in errors.values())
        raise (SpecError if is_spec else CompileError)(_grouped(errors, jobs))
    message = f"sweep: {counted(len(experiments), 'job')} checked, with {counted(cache.proven, 'fake run')}"
    if cache.unproven:
        message += f"; the shapes of {cache.unproven} were not checked within {SECONDS} seconds: "
        message += "those jobs check them first"
    return message


def _grouped(errors: Mapping[int, SpecError | CompileError], jobs: Sequence[ComposedJob]) -> list[Problem]:
    """Each distinct problem once, with the first job that has it."""
    numbers: dict[Problem, list[int]] = {}
    for number in sorted(errors):
        for problem in errors[number].errors:
            numbers.setdefault(problem, []).append(number)
    overrides = [_typed(job) for job in jobs]
    common = set(overrides[0]).intersection(*overrides)
    problems: list[Problem] = []
    for problem, (first, *others) in islice(numbers.items(), MOST_PROBLEMS):
        where = f"job {_named(first, overrides[first])}"
        if problem.where:
            where += f": {problem.where}"
        what = problem.what
        if others:
            alike = [_named(n, [text for text in overrides[n] if text not in common]) for n in others]
            what += f"; the same in {listed(alike, MOST_JOBS)}"
        if _is_swept(problem.where, [text for text in overrides[first] if text not in common]):
            problem = replace(problem, fix=None)  # one value would take the place of all
        problems.append(replace(problem, where=where, what=what, place=problem.place or problem.where))
    if (beyond := len(numbers) - MOST_PROBLEMS) > 0:
        refused = f"{len(errors)} of {len(jobs)} jobs are refused"
        problems.append(Problem("", f"{counted(beyond, 'more problem')}; {refused}"))
    return problems


def _is_swept(key: str, overrides: Iterable[str]) -> bool:
    """Whether one of the overrides, which differ from job to job, is at the key, above or below it."""
    typed = [text.partition("=")[0].lstrip("+~") for text in overrides]
    return any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in typed)


def _typed(job: ComposedJob) -> list[str]:
    """The overrides of a job without those of Hydra's own section."""
    return list(filter_overrides(job.overrides))


def _named(number: int, overrides: Sequence[str]) -> str:
    return f"#{number} ({' '.join(overrides)})" if overrides else f"#{number}"


def _why_no_job(app: App, cfg: DictConfig) -> list[Problem]:
    """The problem of each override that stands for no value at all."""
    problems: list[Problem] = []
    for override in app.swept(cfg):
        if override.is_discrete_sweep() and next(iter(override.sweep_iterator()), None) is None:
            key = override.key_or_group
            why, hint = _why_no_value(key, override.value(), app.options(key))
            what = f"{override.get_value_string()} stands for no value: {why}"
            problems.append(Problem(key, what, hint))
    if problems:
        return problems
    return [Problem("hydra.sweeper", "the sweep has no job", "give a key several values: seed=1,2")]


def _why_no_value(key: str, value: Any, options: list[str]) -> tuple[str, str]:
    """Why a swept value is empty, and the next step; `options` are the names of the group if the key is one."""
    if isinstance(value, RangeSweep):
        hint = "a range goes from its start to below its stop: range(1,5), range(5,1,-1)"
        return "the range is empty", hint
    hint = f"list the values: {key}=1,2,3"
    if not isinstance(value, Glob):
        return "it is empty", hint
    if not options:
        return "glob() picks names of a config group, and this is a key", hint
    return f"it matches none of the config group {key!r}", nearest(" ".join(value.include), options)


def _set_twice(app: App, cfg: DictConfig) -> Iterator[Problem]:
    """The problem of each key that is swept and set again: jobs with different overrides would be the same."""
    swept: dict[str, Override] = {}  # by the key paths that they set
    for override in app.swept(cfg):
        key = key_of(override.get_key_element())
        values = override.sweep_iterator() if override.is_choice_sweep() else [override.value()]
        places = {place for value in values for place, _ in entries(value, key)}
        for place in sorted(places & swept.keys())[:1]:
            before = swept[place].input_line
            hint = f"leave one of them out, or give all values in one list: {key}=A,B,C"
            if before not in cfg.hydra.overrides.task:  # of a file
                hint = f"to replace the values of the file: 'hydra.sweeper.params={{{key}: \"A,B,C\"}}'"
            what = f"is swept over by {before}, and set again by {override.input_line}"
            yield Problem(key, f"{what}: only the last one would count", hint)
        if override.is_sweep_override():
            swept |= dict.fromkeys(places, override)


def _refuse_directory(run_dir: Path, job: DictConfig, sweep_dir: Path, number: int, first: int) -> None:
    """Raise SpecError for a directory that job #`first` has too, or outside the sweep's, as by a value ``../..``."""
    folder = os.path.abspath(str(job.hydra.sweep.dir))
    if folder != str(sweep_dir):
        raise spec_error(
            "hydra.sweep.dir",
            f"is {folder} for this job and {sweep_dir} for the sweep: it holds a value that the sweep varies",
            "put that value into hydra.sweep.subdir",
        )
    hint = "let it hold ${hydra.job.num}"
    section: Any = OmegaConf.to_container(job.hydra.sweep, resolve=False)
    subdir = str(section["subdir"])
    if "${" in subdir and not run_dir.is_relative_to(sweep_dir):
        what = f"{subdir} leads to {run_dir}, outside the directory of the sweep"
        raise spec_error(SUBDIR, what, hint)
    if first != number:
        raise spec_error(SUBDIR, f"job #{first} has the same directory, {run_dir}", hint)


# ---- the launch ----------------------------------------------------------------------------------------------------


def _show(run: SweepRun, experiments: Mapping[int, Experiment], outcome: Outcome) -> int:
    """Print the plan of each experiment below the overrides of its job, on rank 0."""
    if not is_main():
        return DONE
    for number, experiment in experiments.items():
        outcome.refuse_showing(tasks.tasks()["plan"] if run.is_plan else type(task_of(experiment)))
        overrides = list[str]()
        if run.jobs is not None:
            overrides = [*_typed(run.jobs[number]), *(["task=plan"] if run.is_plan else [])]
            print(f"#{number}: {' '.join(overrides)}")
        ready = tasks.prepare(experiment, trust=run.job.trust)
        tasks.show(ready)
        outcome.show(overrides, ready)
        free_job_memory()
    return DONE


def launch(run: SweepRun) -> int:
    """Run the needs and the jobs, and write the page of the sweep; returns the exit code."""
    sweep_dir = run.sweep_dir
    earlier = run.earlier
    with claimed(sweep_dir, "hydra.sweep.dir" if earlier is None else RESUME):
        run.needs.make()
        if earlier is not None and JobDirectories(sweep_dir).jobs != earlier.jobs:
            raise spec_error(RESUME, f"another process has run jobs in {sweep_dir} meanwhile", "try again")
        run.job = replace(run.job, needs=run.needs.made, previous=run.needs.previous)
        with os_errors(f"cannot remove {STOP} or {FINISHED} in {sweep_dir}"):
            for name in (STOP, FINISHED):  # an earlier start may have left it
                (sweep_dir / name).unlink(missing_ok=True)
        is_in_sweeps = sweep_dir.resolve().parent == outputs_folder().with_name(SWEEPS).resolve()
        if is_in_sweeps and (note := update_latest(sweep_dir.resolve())):
            print(note)
        write_json(sweep_dir / SWEEP, {"jobs": None if run.jobs is None else len(run.jobs)})
        with replacing(sweep_dir / MULTIRUN) as file:  # for `resume`; not every sweeper stores it
            file.write(OmegaConf.to_yaml(run.cfg).encode())
        try:
            _run_jobs(run)
            return _tell_end(run)
        except KeyboardInterrupt as interruption:
            print(interrupted(interruption, sweep_dir, run.jobs or ()), file=sys.stderr, flush=True)
            raise
        finally:
            if earlier is not None or any(sweep_dir.rglob(STATUS)):  # an interrupted sweep has a page as well
                make_page(sweep_dir)


def _run_jobs(run: SweepRun) -> None:
    """Let the sweeper and the launcher run the jobs; the exit codes are in `run.codes`."""
    sweep_dir = run.sweep_dir
    try:
        gc.collect()
        gc.freeze()  # `free_job_memory` skips what exists now, most of it of modules
        run.app.sweep_checked(run.cfg, run.job, run.around)
    except SweepStopped as stopped:
        count = None if run.jobs is None else len(run.jobs)
        write_json(sweep_dir / SWEEP, {"jobs": count, "fail_fast": True, "stopped_by": stopped.args[0]})
        (sweep_dir / STOP).unlink(missing_ok=True)
        print(stopped)
    except (HydraException, OmegaConfBaseException, ImportError, OSError) as error:
        # Jobs raise nothing: this exception comes from a sweeper, a launcher or a directory.
        with explained(command_of(run.app, run.cfg, [])):
            raise error
    except Exception as error:
        goal = run.job.goal
        if goal is None or isinstance(error, HookrunError):
            raise
        _refuse_no_value(sweep_dir, run.codes, goal, error)
        raise


def _tell_end(run: SweepRun) -> int:
    """Print how the jobs ended; returns the exit code of the sweep."""
    sweep_dir = run.sweep_dir
    codes = run.codes
    if not codes:
        raise spec_error(
            "hydra.sweeper", "the sweeper ran no job", "check the number of jobs in its settings"
        )
    failed = {run_dir: code for run_dir, code in codes.items() if code != DONE}
    jobs = run.jobs or ()
    count = max(len(jobs), len(codes))
    line = f"sweep: {len(codes) - len(failed)} of {count} jobs done"
    if run.again:
        line += f", {run.again} of them before"
    if count > len(codes):
        line += f", {count - len(codes)} not started"
    print(f"{line}, in {sweep_dir}")
    if run.earlier is not None and run.earlier.left:
        print(f"  {run.earlier.left} more in it, with configurations other than this sweep's")
    elif run.made_of and not failed and count == len(codes):
        hashes = [job.config for job in jobs]
        write_json(sweep_dir / FINISHED, {"finished": hash_with(run.made_of, hashes)})
    for run_dir, code in failed.items():
        print(f"  exit code {code}: {run_dir}")
    facts = SweepData(sweep_dir, find_jobs(sweep_dir))
    if len(facts.jobs) > 1 and (best := conclusion(facts)):
        print(best)
    return most_serious(codes.values())


def _refuse_no_value(sweep_dir: Path, codes: Mapping[str, int], goal: Goal, error: Exception) -> None:
    """Raise HookrunError if no job has a value of the goal, which explains why the sweeper failed with `error`."""
    for run_dir in (path for path, code in codes.items() if code == DONE):
        try:
            tasks.objective(Path(run_dir))
        except HookrunError:
            continue
        return
    if not codes:
        raise spec_error("hydra.sweeper", f"the sweeper ran no job: {reason(error)}") from error
    raise JobFailed(
        f"none of the {len(codes)} jobs has a finite {goal.metric}: the sweeper has nothing to choose from, "
        f"in {sweep_dir}",
        most_serious(codes.values()) or FAILED,
    ) from error

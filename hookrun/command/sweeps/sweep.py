"""Sweeps: every job is composed and validated before the first one runs; if a job fails, the others still run."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from hookrun.command.compose.compose import JOB_DIRECTORY, claimed, plain_run, planned, refuse_used
from hookrun.command.compose.errors import explained
from hookrun.command.compose.hydra import App, numbered
from hookrun.command.compose.overrides import RESUME
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
from hookrun.command.sweeps.needs import NeededRuns, with_found_runs
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
from hookrun.run.tasks import JobCache, check_jobs, parse_experiment, refuse_ranks, required_goal, task_of
from hookrun.store.files import os_errors, replacing, write_json
from hookrun.store.format import MULTIRUN, REPORT, STATUS, SWEEP, entries
from hookrun.store.objective import Direction, Goal
from hookrun.store.records import SweepRecord
from hookrun.store.run_dir import outputs_folder, update_latest

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

_SWEEPER = "hydra.sweeper"
_FAILURES = "max_failure_rate"
_SETTINGS: Mapping[str, Mapping[Direction, Any]] = {
    "direction": {"maximize": "maximize", "minimize": "minimize"},  # optuna
    "ax_config.experiment.minimize": {"maximize": False, "minimize": True},
    "optim.maximize": {"maximize": True, "minimize": False},  # nevergrad
}
"""Setting of a sweeper -> its value for each direction of the objective."""


def sweep(
    app: App,
    cfg: DictConfig,
    trust: frozenset[str],
    *,
    go_on: bool = False,
    anyway: bool = False,
    fail_fast: bool = False,
    verbose: bool = False,
) -> int:
    """Run the jobs of `cfg`; returns the most serious of their exit codes.

    go_on:     whether the sweep is resumed; jobs that are over are not run again
    anyway:    whether jobs are resumed even if their states are of another model, data or version
    fail_fast: whether no job starts after one has failed
    verbose:   whether jobs print all that a single run prints, and not one line each

    Raises SpecError, before anything is written, if a job does not compose or validate. A sweeper that chooses
    its jobs while it runs cannot list them: only their common configuration is checked then.
    """
    command = command_of(app, cfg, [])
    with explained(command):
        # Resolve the time in the directory's name once, so that it is the same for every job.
        HydraConfig.instance().set_config(cfg)
        sweep_dir = Path(os.path.abspath(str(cfg.hydra.sweep.dir)))
        # Sweepers and launchers resolve their settings later, outside `explained`: find mistakes now.
        OmegaConf.to_container(cfg.hydra.sweeper, resolve=True)
        OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
        named = app.jobs(cfg)
    refuse(list(_set_twice(app, cfg)))
    needs = NeededRuns(command, trust)
    swept = frozenset(key_of(each.get_key_element()) for each in app.swept(cfg) if each.is_sweep_override())
    known = JobDirectories(sweep_dir) if go_on else None
    job = SweepJob(
        trust,
        begun=None if known is None else frozenset(known.found),
        anyway=anyway,
        stop=sweep_dir / STOP if fail_fast else None,
        lines=None if verbose else JobLines(swept),
    )
    run = SweepRun(app, cfg, sweep_dir, job, known)
    if named is None:
        return _optimize(run, needs)
    if not named:
        raise SpecError(_why_no_job(app, cfg))
    run.made_of = made_of(app, cfg, named)
    if known is not None and _is_finished(run, known):
        count = len(known.found)
        print(
            f"sweep: {count} of {count} jobs done, {count} of them before, in {sweep_dir}\n"
            f"report: {sweep_dir / REPORT}"
        )
        return DONE
    run.jobs = jobs = jobs_of(app, cfg, named, MOST_REFUSED)
    if known is not None:
        known.place(jobs)
    typed = [list(filter_overrides(job.overrides)) for job in jobs]
    experiments, refused, shows = _validated(run, jobs)
    if not shows:
        _refuse_ranks(experiments.values())
    elif not is_main():  # only rank 0 prints the plan
        return DONE
    if refused and not _compile_differently(app, cfg):
        experiments = {}  # report the problems now, before torch is imported
    experiments, previous = with_found_runs(experiments, needs, shows=shows)
    if experiments:
        import_torch()
    if experiments or refused:
        message = _check(experiments, typed, refused, trust)
        if shows:
            return _show([(each, " ".join(typed[number])) for number, each in experiments.items()], trust)
        print(message, flush=True)
    del experiments
    if job.lines is not None:
        job.lines.total = len(jobs)
    return _launch(run, needs, previous)


def _is_finished(run: SweepRun, known: JobDirectories) -> bool:
    """Whether the same sweep has ended in its directory and nothing is left to do; no job is composed for that."""
    record = record_in(run.sweep_dir / FINISHED, SweepRecord)
    found = hash_with(run.made_of, [config for config, _ in known.found.values()])
    if not run.made_of or record.get("finished") != found:
        return False
    return (run.sweep_dir / REPORT).exists() and all(
        code == DONE and not lacks_page(run.sweep_dir / name) for name, (_, code) in known.found.items()
    )


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


def _compile_differently(app: App, cfg: DictConfig) -> bool:
    """Whether the swept keys may change the names or shapes of the hooks."""
    return any(
        each.is_sweep_override() and root_of(each.key_or_group) in _COMPILED for each in app.swept(cfg)
    )


def _optimize(run: SweepRun, needs: NeededRuns) -> int:
    """Run a sweep whose jobs are chosen by their objective; returns the exit code.

    The common configuration is checked here, and each job before it runs.
    """
    app, cfg, trust = run.app, run.cfg, run.job.trust
    if cfg.get("baseline") is True:
        raise spec_error(
            "baseline",
            "the sweeper of this sweep chooses its jobs as it goes, and a baseline is not one that it would choose",
            "run it beside the sweep: hooked=false, without -m",
        )
    experiment = parse_experiment(plain_run(numbered(copy.deepcopy(cfg), 0), *JOB_DIRECTORY))
    shows = task_of(experiment).shows
    if not shows:
        _refuse_ranks([experiment])
    elif not is_main():
        return DONE
    experiments, previous = with_found_runs({0: experiment}, needs, shows=shows)
    if shows:
        return _show([(experiments[0], "")], trust)
    goal = required_goal(experiment)
    message = set_direction(cfg, goal)
    if not _compile_differently(app, cfg):  # else the jobs' own values decide whether they compile
        tasks.prepare(experiments[0], trust=trust, cache=JobCache(SECONDS))
    print(message, flush=True)
    prepare_sweeper(cfg, experiment.settings.seed)
    return _launch(run, needs, previous, goal)


def set_direction(cfg: DictConfig, goal: Goal) -> str:
    """Set the sweeper's direction unless it is set; returns a message.

    Raises SpecError where the sweeper was set to another direction, or to several objectives.
    """
    sweeper = cfg.hydra.sweeper
    message = f"objective: {goal}"
    setting = next((key for key in _SETTINGS if OmegaConf.select(sweeper, key) is not None), None)
    if setting is None:
        kind = str(sweeper.get("_target_", "")).rpartition(".")[2]
        return (
            f"{message}\nNOTE: {kind} has no setting that says which direction is better, as far as hookrun knows: "
            f"it gets the value unchanged. Make sure that it is set to {goal.direction}"
        )
    where, value = f"{_SWEEPER}.{setting}", OmegaConf.select(sweeper, setting)
    if OmegaConf.is_list(value):
        raise spec_error(
            where,
            f"found {OmegaConf.to_container(value)}, and a run has one objective, {goal.metric}",
            "leave it out: hookrun sets it by `objective`",
        )
    wanted = _SETTINGS[setting][goal.direction]
    # The plugin's default of `direction` is the member of an enumeration; the others are set if they were typed.
    is_set = not isinstance(value, Enum) if setting == "direction" else _is_typed(cfg, setting)
    value = value.lower() if isinstance(value, str) else value
    if not is_set:
        with read_write(sweeper), open_dict(sweeper):
            OmegaConf.update(sweeper, setting, wanted)
    elif value != wanted:
        what = f"found {value!r}, and the objective is to {goal.direction} {goal.metric}"
        other = "minimize" if goal.direction == "maximize" else "maximize"
        hint = f"leave one of them out; to {other} it, objective.direction={other}"
        of_goal = f"is {goal.direction!r} for {goal.metric}, and {where} is not"
        raise SpecError([Problem(where, what, hint), Problem("objective.direction", of_goal)])
    return message


def _is_typed(cfg: DictConfig, key: str) -> bool:
    typed = cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.hydra))
    return f"{_SWEEPER}.{key}" in map(key_of, typed)


def prepare_sweeper(cfg: DictConfig, seed: int) -> None:
    """Give the sweeper the defaults of a sweep by hookrun.

    A sweep goes on after failed jobs, unless a failure rate was typed. A sampler without a seed gets the experiment's,
    so that a resumed sweep chooses the same jobs again: those that have finished return their stored values.
    """
    sweeper = cfg.hydra.sweeper
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        if sweeper.get(_FAILURES) == 0 and not _is_typed(cfg, _FAILURES):
            sweeper[_FAILURES] = 1.0
        sampler = sweeper.get("sampler")
        if OmegaConf.is_dict(sampler) and sampler.get("seed", 0) is None:
            sampler.seed = seed % 2**32  # what NumPy's generators take


def _validated(
    run: SweepRun, jobs: Sequence[ComposedJob]
) -> tuple[dict[int, Experiment], dict[int, SpecError], bool]:
    """The experiment of each valid job, the error of each invalid job, and whether all valid jobs are only shown.

    Stops after MOST_REFUSED invalid jobs. A job that has finished is left out: it does not run again.
    """
    experiments, run_dirs, shown = dict[int, Experiment](), dict[Path, int](), set[int]()
    refused = {number: job.error for number, job in enumerate(jobs) if job.error is not None}
    for number, composed in enumerate(jobs):
        if composed.exit_code is not None or not composed.config:
            continue
        try:
            job = composed.configuration()
            experiment = parse_experiment(plain_run(job, *JOB_DIRECTORY))
            if task_of(experiment).shows:
                shown.add(number)
                experiment = planned(
                    experiment,
                    composed.overrides,
                    lambda overrides, job=composed: plain_run(  # type: ignore[misc]
                        replace(job, overrides=overrides, cfg=None).configuration(), *JOB_DIRECTORY
                    ),
                )
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
    if not (shows := shown >= experiments.keys()):
        refused |= dict.fromkeys(
            shown, spec_error("task", "this job only prints, and other jobs are run", "make two sweeps of it")
        )
        experiments = {number: each for number, each in experiments.items() if number not in shown}
    return experiments, refused, shows


def _check(
    experiments: Mapping[int, Experiment],
    overrides: Sequence[Sequence[str]],
    refused: Mapping[int, SpecError | CompileError],
    trust: frozenset[str],
) -> str:
    """Check the valid jobs; returns a message that says what was checked.

    experiments: job index -> experiment of each valid job
    overrides:   the overrides of every job
    refused:     job index -> error of each invalid job

    Raises SpecError, or CompileError where nothing else is wrong, with the problems of all jobs.
    """
    cache = JobCache(SECONDS)
    wrong = check_jobs(experiments, cache, trust=trust)
    free_job_memory()
    if all_refused := dict(sorted({**refused, **wrong}.items())):
        is_spec = any(isinstance(error, SpecError) for error in all_refused.values())
        raise (SpecError if is_spec else CompileError)(_grouped(all_refused, overrides))
    message = f"sweep: {counted(len(experiments), 'job')} checked, with {counted(cache.proven, 'fake run')}"
    if cache.unproven:
        message += f"; the shapes of {cache.unproven} were not checked within {SECONDS} seconds: "
        message += "those jobs check them first"
    return message


def _grouped(
    refused: Mapping[int, SpecError | CompileError], overrides: Sequence[Sequence[str]]
) -> list[Problem]:
    """Each distinct problem once, with the first job that has it."""
    jobs = dict[Problem, list[int]]()
    for number, error in refused.items():
        for problem in error.errors:
            jobs.setdefault(problem, []).append(number)
    common = set(overrides[0]).intersection(*overrides)
    problems = list[Problem]()
    for problem, (first, *others) in list(jobs.items())[:MOST_PROBLEMS]:
        where = ": ".join(filter(None, [f"job {_named(first, overrides[first])}", problem.where]))
        alike = [_named(n, [text for text in overrides[n] if text not in common]) for n in others]
        also = f"; the same in {listed(alike, MOST_JOBS)}" if alike else ""
        problems.append(Problem(where, problem.what + also, problem.hint))
    if (beyond := len(jobs) - MOST_PROBLEMS) > 0:
        of_all = f"{len(refused)} of {len(overrides)} jobs are refused"
        problems.append(Problem("", f"{counted(beyond, 'more problem')}; {of_all}"))
    return problems


def _named(number: int, overrides: Sequence[str]) -> str:
    return f"#{number} ({' '.join(overrides)})" if overrides else f"#{number}"


def _why_no_job(app: App, cfg: DictConfig) -> list[Problem]:
    """The problem of each override that stands for no value at all."""
    problems = list[Problem]()
    for override in app.swept(cfg):
        if not override.is_discrete_sweep() or next(iter(override.sweep_iterator()), None) is not None:
            continue
        key, value = override.key_or_group, override.value()
        why, hint = "it is empty", f"list the values: {key}=1,2,3"
        if isinstance(value, RangeSweep):
            why = "the range is empty"
            hint = "a range goes from its start to below its stop: range(1,5), range(5,1,-1)"
        elif isinstance(value, Glob):
            why = "glob() picks names of a config group, and this is a key"
            if options := app.options(key):
                why = f"it matches none of the config group {key!r}"
                hint = nearest(" ".join(value.include), options)
        problems.append(Problem(key, f"{override.get_value_string()} stands for no value: {why}", hint))
    return problems or [
        Problem("hydra.sweeper", "the sweep has no job", "give a key several values: seed=1,2")
    ]


def _set_twice(app: App, cfg: DictConfig) -> Iterator[Problem]:
    """The problem of each key that is swept and set again: jobs with different overrides would be the same."""
    swept = dict[str, Override]()  # by the key paths that they set
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
        swept |= dict.fromkeys(places if override.is_sweep_override() else (), override)


def _refuse_directory(run_dir: Path, job: DictConfig, sweep_dir: Path, number: int, first: int) -> None:
    """Raise SpecError for a directory that job #`first` has too, or outside the sweep's, as by a value ``../..``."""
    subdir = str(OmegaConf.to_container(job.hydra.sweep, resolve=False)["subdir"])  # type: ignore[call-overload, index]
    own = os.path.abspath(str(job.hydra.sweep.dir))
    if own != str(sweep_dir):
        raise spec_error(
            "hydra.sweep.dir",
            f"is {own} for this job and {sweep_dir} for the sweep: it holds a value that the sweep varies",
            "put that value into hydra.sweep.subdir",
        )
    what = "" if first == number else f"job #{first} has the same directory, {run_dir}"
    if "${" in subdir and not run_dir.is_relative_to(sweep_dir):
        what = f"{subdir} leads to {run_dir}, outside the directory of the sweep"
    if what:
        raise spec_error(SUBDIR, what, "let it hold ${hydra.job.num}")


def _show(experiments: Iterable[tuple[Experiment, str]], trust: frozenset[str]) -> int:
    """Print the plan of each experiment below the overrides of its job."""
    for number, (experiment, overrides) in enumerate(experiments):
        if overrides:
            print(f"#{number}: {overrides}")
        tasks.show(tasks.prepare(experiment, trust=trust))
        free_job_memory()
    return DONE


def _launch(run: SweepRun, needs: NeededRuns, previous: str | None, goal: Goal | None = None) -> int:
    """Run the needs and the jobs, and write the page of the sweep; returns the exit code."""
    sweep_dir, known = run.sweep_dir, run.known
    with claimed(sweep_dir, "hydra.sweep.dir" if known is None else RESUME):
        needs.make()
        if known is not None and JobDirectories(sweep_dir).found != known.found:
            raise spec_error(RESUME, f"another process has run jobs in {sweep_dir} meanwhile", "try again")
        run.job = replace(run.job, goal=goal, needs=needs.made, previous=previous)
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
            return _run_jobs(run)
        except KeyboardInterrupt as interruption:
            print(interrupted(interruption, sweep_dir, run.jobs or ()), file=sys.stderr, flush=True)
            raise
        finally:
            if known is not None or any(sweep_dir.rglob(STATUS)):  # an interrupted sweep has a page as well
                make_page(sweep_dir)


def _run_jobs(run: SweepRun) -> int:
    """Run the jobs and print how they ended; returns the exit code."""
    sweep_dir, codes, goal = run.sweep_dir, run.codes, run.job.goal
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
        if goal is None or isinstance(error, HookrunError):
            raise
        _refuse_no_value(sweep_dir, codes, goal, error)
        raise
    if not codes:
        raise spec_error(
            "hydra.sweeper", "the sweeper ran no job", "check the number of jobs in its settings"
        )
    failed = {run_dir: code for run_dir, code in codes.items() if code != DONE}
    before = f", {run.again} of them before" if run.again else ""
    count = max(len(run.jobs or ()), len(codes))
    rest = f", {count - len(codes)} not started" if count > len(codes) else ""
    print(f"sweep: {len(codes) - len(failed)} of {count} jobs done{before}{rest}, in {sweep_dir}")
    if run.known is not None and (left := run.known.left):
        print(f"  {left} more in it, with configurations other than this sweep's")
    elif run.made_of and not failed and count == len(codes):
        configs = [job.config for job in run.jobs or ()]
        write_json(sweep_dir / FINISHED, {"finished": hash_with(run.made_of, configs)})
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

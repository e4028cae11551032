"""Sweeps: every job is composed and validated before the first one runs; if a job fails, the others still run."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hookrun.cli.baseline import of_baseline, refuse_baseline, with_baselines
from hookrun.cli.check import Composition
from hookrun.cli.compose import claimed, plain_job, planned, unused_run_dir
from hookrun.cli.errors import explained
from hookrun.cli.exit_codes import DONE, FAILED, most_serious
from hookrun.cli.garbage import collector_of_jobs, import_torch, release_memory
from hookrun.cli.hydra import App, numbered
from hookrun.cli.interrupted import interrupted
from hookrun.cli.job_directories import JobDirectories
from hookrun.cli.job_hash import JobHashes
from hookrun.cli.jobs import SweepJob, make_page
from hookrun.cli.launching import Launching, SweepStopped
from hookrun.cli.needs import NeededRuns, previous_run
from hookrun.cli.optimizing import tell_sweeper
from hookrun.cli.stopping import STOP, forget_stop, keep_count, keep_stop
from hookrun.cli.stored_sweep import KEY
from hookrun.cli.study import prepare_study
from hookrun.cli.sweep_check import SECONDS, check
from hookrun.errors import HookrunError, Problem, SpecError, nearest, reason
from hookrun.ranks.alone import is_main, size_of_world
from hookrun.spec import Experiment
from hookrun.spec.objective import Goal
from hookrun.store.outputs import outputs_folder
from hookrun.tasks import check_jobs, parse_experiment, refuse_ranks, required_goal, task_of

_COMPILED = frozenset({"hooks", "model", "data", "task", "experiment"})
"""The root keys that may make the jobs of a sweep compile differently."""

MOST_REFUSED = 100
"""The number of invalid jobs after which no further job is validated."""

_SHOWN_AMONG_RUNS = Problem("task", "this job only prints, and other jobs are run", "make two sweeps of it")


def sweep(
    app: App,
    cfg: DictConfig,
    trust: frozenset[str],
    *,
    go_on: bool = False,
    anyway: bool = False,
    fail_fast: bool = False,
) -> int:
    """Run the jobs of `cfg`; returns the most serious of their exit codes.

    go_on:     whether the sweep is resumed; jobs that are over are not run again
    anyway:    whether jobs are resumed even if their states are of another model, data or version
    fail_fast: whether no job starts after one has failed

    Raises SpecError, before anything is written, if a job does not compose or validate. A sweeper that chooses
    its jobs while it runs cannot list them: only their common configuration is checked then.
    """
    with explained(_asked(app, cfg, [])):
        # Resolve the time in the directory's name once, so that it is the same for every job.
        HydraConfig.instance().set_config(cfg)
        sweep_dir = Path(os.path.abspath(str(cfg.hydra.sweep.dir)))
        # Sweepers and launchers resolve their settings later, outside `explained`: find mistakes now.
        OmegaConf.to_container(cfg.hydra.sweeper, resolve=True)
        OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
        named = app.jobs(cfg)
        hashes = JobHashes(app, cfg)
        jobs = None if named is None else with_baselines(app, cfg, named, hashes)
    needs = NeededRuns(_asked(app, cfg, []), trust)
    asked = SweepJob(trust, go_on=go_on, anyway=anyway, stop=sweep_dir / STOP if fail_fast else None)
    if jobs is None:
        return _optimize(app, cfg, sweep_dir, asked, needs)
    if not jobs:
        raise SpecError(_why_no_job(app, cfg))
    typed = [list(filter_overrides(overrides)) for overrides in jobs]
    over = _over(hashes, sweep_dir, jobs) if go_on else frozenset[int]()
    added = jobs[: len(jobs) - len(named or ())]
    experiments, refused, shows = _validated(app, cfg, jobs, over, go_on)
    refused |= {number: of_baseline(refused[number]) for number in range(len(added)) if number in refused}
    if not shows:
        _refuse_ranks(experiments.values())
    elif not is_main():  # only rank 0 prints the plan
        return DONE
    if refused and not _compile_differently(app, cfg):
        experiments = {}  # report the problems now, before torch is imported
    for experiment in experiments.values():
        needs.find(experiment)
    needs.prepare(shows=shows)
    previous = previous_run(experiments.values(), outputs_folder())
    runs = needs.known(previous)
    experiments = {number: runs.of(experiment) for number, experiment in experiments.items()}
    if experiments:
        import_torch()
    if experiments or refused:
        said = check(experiments, typed, refused, trust)
        if shows:
            return _show(
                list(experiments.values()), [" ".join(typed[number]) for number in experiments], trust
            )
        print(said, flush=True)
    del experiments
    with claimed(sweep_dir, KEY if go_on else "hydra.sweep.dir"):
        needs.make()
        return _launch(app, cfg, hashes, sweep_dir, replace(asked, runs=needs.known(previous)), added)


def _refuse_ranks(experiments: Iterable[Experiment]) -> None:
    """Raise SpecError where the process is one of several ranks: a sweep runs in one process."""
    if all(each.settings.compute.strategy == "none" for each in experiments):
        refuse_ranks()
    elif (size := size_of_world()) > 1:
        what = (
            f"found {size} processes (WORLD_SIZE), and a sweep runs its jobs one after the other in one: a rank that "
            "failed in one job would end all later jobs too"
        )
        hint = "start each job with its own torchrun, or the sweep without torchrun"
        raise SpecError([Problem("-m", what, hint)])


def _over(job_hashes: JobHashes, sweep_dir: Path, jobs: list[list[str]]) -> frozenset[int]:
    """The indexes of the jobs that are over already."""
    hashes = list[str]()
    for overrides in jobs:
        try:
            hashes.append(job_hashes.of(overrides))
        except SpecError:  # `_validated` reports it with the other jobs' problems
            hashes.append("")
    over = JobDirectories(sweep_dir).over(hashes)
    return frozenset(number for number, is_over in enumerate(over) if is_over)


def _compile_differently(app: App, cfg: DictConfig) -> bool:
    """Whether the swept keys may change the names or shapes of the hooks."""
    swept = {re.split(r"[./@]", each.key_or_group)[0] for each in app.swept(cfg) if each.is_sweep_override()}
    return not swept.isdisjoint(_COMPILED)


def _optimize(app: App, cfg: DictConfig, sweep_dir: Path, asked: SweepJob, needs: NeededRuns) -> int:
    """Run a sweep whose jobs are chosen by their objective; returns the exit code.

    The common configuration is checked here, and each job before it runs.
    """
    refuse_baseline(cfg)
    trust = asked.trust
    experiment = parse_experiment(plain_job(numbered(copy.deepcopy(cfg), 0)))
    shows = task_of(experiment).shows
    if not shows:
        _refuse_ranks([experiment])
    elif not is_main():
        return DONE
    needs.find(experiment)
    needs.prepare(shows=shows)
    previous = previous_run([experiment], outputs_folder())
    experiment = needs.known(previous).of(experiment)
    if shows:
        return _show([experiment], [""], trust)
    goal = required_goal(experiment)
    said = tell_sweeper(cfg, goal)
    if not _compile_differently(app, cfg):  # else the jobs' own values decide whether they compile
        for error in check_jobs({0: experiment}, SECONDS, trust=trust).refused.values():
            raise error
    print(said, flush=True)
    with claimed(sweep_dir, KEY if asked.go_on else "hydra.sweep.dir"):
        needs.make()
        if kept := prepare_study(cfg, sweep_dir, experiment.settings.seed):
            print(kept, flush=True)
        job = replace(asked, optimizing=True, goal=goal, runs=needs.known(previous))
        return _launch(app, cfg, JobHashes(app, cfg), sweep_dir, job)


def _asked(app: App, cfg: DictConfig, overrides: list[str]) -> Composition:
    shared: Any = OmegaConf.to_container(cfg.hydra.overrides.hydra)
    return Composition(app, cfg.hydra.job.config_name, [*shared, *overrides])


def _validated(
    app: App, cfg: DictConfig, jobs: list[list[str]], over: frozenset[int], go_on: bool
) -> tuple[dict[int, Experiment], dict[int, SpecError], bool]:
    """The experiment of each valid job, the error of each invalid job, and whether all valid jobs are only shown.

    Stops after MOST_REFUSED invalid jobs.

    over:  the indexes of jobs that do not run again
    go_on: whether directories may hold runs already
    """
    experiments, refused = dict[int, Experiment](), dict[int, SpecError]()
    run_dirs, shown = dict[Path, int](), set[int]()
    for number, overrides in enumerate(jobs):
        if number in over:
            continue
        try:
            with explained(_asked(app, cfg, overrides)):
                job = app.job_config(cfg, overrides, number)
            experiment = parse_experiment(plain_job(job))
            if task_of(experiment).shows:
                shown.add(number)
                experiment = planned(experiment, overrides, partial(_job_config, app, cfg, number))
            else:
                run_dir = (
                    Path(job.hydra.runtime.output_dir) if go_on else unused_run_dir(job, "hydra.sweep.dir")
                )
                _refuse_outside(run_dir, job)
                _refuse_shared(run_dir, run_dirs.setdefault(run_dir, number), number)
        except SpecError as error:
            refused[number] = error
            if len(refused) >= MOST_REFUSED:
                break
            continue
        experiments[number] = experiment
    if not (shows := shown >= experiments.keys()):
        refused |= {number: SpecError([_SHOWN_AMONG_RUNS]) for number in shown}
        experiments = {number: each for number, each in experiments.items() if number not in shown}
    return experiments, refused, shows


def _why_no_job(app: App, cfg: DictConfig) -> list[Problem]:
    """The problem of each override that stands for no value at all."""
    return [
        Problem(override.key_or_group, f"{override.get_value_string()} stands for no value: {why}", hint)
        for override in app.swept(cfg)
        if override.is_discrete_sweep() and next(iter(override.sweep_iterator()), None) is None
        for why, hint in [_why_no_value(override, app)]
    ] or [Problem("hydra.sweeper", "the sweep has no job", "give a key several values: seed=1,2")]


def _why_no_value(override: Override, app: App) -> tuple[str, str]:
    key, value = override.key_or_group, override.value()
    if isinstance(value, Glob):
        options = app.options(key)
        if not options:
            return "glob() picks names of a config group, and this is a key", f"list the values: {key}=1,2,3"
        return f"it matches none of the config group {key!r}", nearest(" ".join(value.include), options)
    if isinstance(value, RangeSweep):
        return (
            "the range is empty",
            "a range goes from its start to below its stop: range(1,5), range(5,1,-1)",
        )
    return "it is empty", f"list the values: {key}=1,2,3"


def _job_config(app: App, cfg: DictConfig, number: int, overrides: list[str]) -> dict[str, Any]:
    with explained(_asked(app, cfg, overrides)):
        return plain_job(app.job_config(cfg, overrides, number))


def _refuse_outside(run_dir: Path, job: DictConfig) -> None:
    """Raise SpecError for a `subdir` in which a value such as ``../..`` leads out of the sweep's directory."""
    typed = str(OmegaConf.to_container(job.hydra.sweep, resolve=False)["subdir"])  # type: ignore[call-overload, index]
    if "${" in typed and not run_dir.is_relative_to(os.path.abspath(str(job.hydra.sweep.dir))):
        what = f"{typed} leads to {run_dir}, outside the directory of the sweep"
        raise SpecError([Problem("hydra.sweep.subdir", what, "let it hold ${hydra.job.num}")])


def _refuse_shared(run_dir: Path, first: int, number: int) -> None:
    if first != number:
        what = f"job #{first} has the same directory, {run_dir}"
        raise SpecError([Problem("hydra.sweep.subdir", what, "let it hold ${hydra.job.num}")])


def _show(experiments: list[Experiment], names: list[str], trust: frozenset[str]) -> int:
    from hookrun import tasks

    for number, (experiment, name) in enumerate(zip(experiments, names, strict=True)):
        if name:
            print(f"#{number}: {name}")
        tasks.show(tasks.prepare(experiment, trust=trust))
        release_memory()
    return DONE


def _launch(
    app: App,
    cfg: DictConfig,
    hashes: JobHashes,
    sweep_dir: Path,
    job: SweepJob,
    added: Sequence[list[str]] = (),
) -> int:
    """Run the jobs and write the page of the sweep; returns the exit code.

    added: the overrides of jobs that run before those of the sweeper
    """
    before = _statuses(sweep_dir)
    known = JobDirectories(sweep_dir) if job.go_on else None
    if known is not None:
        job = replace(job, begun=known.begun)
    launching = Launching(
        app, cfg, sweep_dir, known, hashes, goal=job.goal, fail_fast=job.stop is not None, added=added
    )
    forget_stop(sweep_dir)
    count = None
    if (named := app.jobs(cfg)) is not None:
        count = len(added) + len(named)
        keep_count(sweep_dir, count)
    try:
        return _run_jobs(app, cfg, launching, job, count)
    except KeyboardInterrupt as interruption:
        names = None if known is None else launching.names
        every = None if named is None else [*added, *named]
        print(interrupted(interruption, sweep_dir, every, names), file=sys.stderr, flush=True)
        raise
    finally:
        if job.go_on or _statuses(sweep_dir) != before:  # an interrupted sweep has a page as well
            make_page(sweep_dir)


def _run_jobs(app: App, cfg: DictConfig, launching: Launching, job: SweepJob, count: int | None) -> int:
    """Run the jobs and print how they ended; returns the exit code.

    count: the number of jobs of the sweep; None where the sweeper chooses them while it runs
    """
    sweep_dir, codes = launching.sweep_dir, launching.codes
    try:
        with collector_of_jobs():
            app.sweep_checked(cfg, job, launching.over)
    except SweepStopped as stopped:
        keep_stop(sweep_dir, stopped)
        print(stopped)
    except (HydraException, OmegaConfBaseException, ImportError, OSError) as error:
        # Jobs raise nothing: this exception comes from a sweeper, a launcher or a directory.
        with explained(_asked(app, cfg, [])):
            raise error
    except Exception as error:
        if job.goal is None or isinstance(error, HookrunError):
            raise
        _refuse_no_value(sweep_dir, codes, job.goal, error)
        raise
    if not codes:
        raise SpecError(
            [Problem("hydra.sweeper", "the sweeper ran no job", "check the number of jobs in its settings")]
        )
    failed = {run_dir: code for run_dir, code in codes.items() if code != DONE}
    before = f", {launching.again} of them before" if launching.again else ""
    count = max(count or 0, len(codes))
    rest = f", {count - len(codes)} not started" if count > len(codes) else ""
    print(f"sweep: {len(codes) - len(failed)} of {count} jobs done{before}{rest}, in {sweep_dir}")
    if launching.left:
        print(f"  {launching.left} more in it, with configurations other than this sweep's")
    for run_dir, code in failed.items():
        print(f"  exit code {code}: {run_dir}")
    if best := _best(sweep_dir):
        print(best)
    return most_serious(codes.values())


def _best(sweep_dir: Path) -> str:
    """A line about the best job; empty where no job has a value, or the jobs have different objectives."""
    from hookrun.report.jobs import find_jobs
    from hookrun.report.sweep_facts import SweepFacts

    facts = SweepFacts(sweep_dir, find_jobs(sweep_dir), {})
    best = facts.best
    if best is None or best.value is None or len(facts.jobs) < 2:
        return ""
    settings = " ".join(f"{key}={best.overrides[key]}" for key in facts.varied if key in best.overrides)
    name = f"{best.name} ({settings})" if settings else best.name
    found = facts.difference(best)
    baseline = f" (without hooks: {best.value - found.value:.6g})" if found else ""
    return f"best: job {name}, {facts.goals[0].metric} {best.value:.6g}{baseline}; to {facts.goals[0]}"


def _refuse_no_value(sweep_dir: Path, codes: Mapping[str, int], goal: Goal, error: Exception) -> None:
    """Raise HookrunError if no job has a value of the goal, which explains why the sweeper failed with `error`."""
    from hookrun import tasks

    for run_dir in (path for path, code in codes.items() if code == DONE):
        try:
            tasks.objective(Path(run_dir))
        except HookrunError:
            continue
        return
    if not codes:
        raise SpecError([Problem("hydra.sweeper", f"the sweeper ran no job: {reason(error)}")]) from error
    said = f"none of the {len(codes)} jobs has a finite {goal.metric}: the sweeper has nothing to choose from"
    failure = NoResult(f"{said}, in {sweep_dir}")
    failure.exit_code = most_serious(codes.values()) or FAILED
    raise failure from error


class NoResult(HookrunError):
    """No job of an optimizing sweep has a value of its objective."""


def _statuses(sweep_dir: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sweep_dir.rglob("status.json")}

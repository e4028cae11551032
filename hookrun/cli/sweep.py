"""Sweeps: every job is composed and validated before the first runs; when one fails, the others still run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, filter_overrides
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hookrun.cli.check import Composition
from hookrun.cli.compose import plain_job, planned, unused_run_dir
from hookrun.cli.errors import explained
from hookrun.cli.hydra import App, numbered
from hookrun.cli.jobs import DONE, FAILED, SweepJob, make_page, most_serious, release_memory
from hookrun.cli.needs import NeededRuns, previous_run
from hookrun.errors import Problem, SpecError
from hookrun.spec import Experiment
from hookrun.store.outputs import outputs_folder
from hookrun.tasks import parse_experiment, refuse_ranks, task_of


def sweep(app: App, cfg: DictConfig, trust: frozenset[str]) -> int:
    """Run the jobs of `cfg`; returns the most serious of their exit codes.

    Raises SpecError, before anything is written, if a job does not compose or validate. A sweeper that chooses
    its jobs as it goes cannot name them: there the configuration that they share is checked.
    """
    with explained(_asked(app, cfg, [])):
        # The time in the directory's name is resolved here, once, so that it is the same for every job.
        HydraConfig.instance().set_config(cfg)
        sweep_dir = Path(str(cfg.hydra.sweep.dir)).absolute()
        # Installed sweepers and launchers resolve their settings themselves, where nothing is refused any more.
        OmegaConf.to_container(cfg.hydra.sweeper, resolve=True)
        OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
        jobs = app.jobs(cfg)
    needs = NeededRuns(_asked(app, cfg, []), trust)
    if jobs is None:
        experiments = [parse_experiment(plain_job(numbered(copy.deepcopy(cfg), 0)))]
        names = [""]
    else:
        names = [" ".join(filter_overrides(overrides)) for overrides in jobs]
        experiments = _validated(app, cfg, jobs, names)
    if all(task_of(experiment).shows for experiment in experiments):
        if jobs is not None:
            experiments = [
                planned(experiment, overrides, partial(_job_config, app, cfg, number))
                for number, (experiment, overrides) in enumerate(zip(experiments, jobs, strict=True))
            ]
        for experiment in experiments:
            needs.find(experiment)
        needs.prepare(shows=True)
        runs = needs.known(previous_run(experiments, outputs_folder()))
        return _show(list(map(runs.of, experiments)), names, trust)
    refuse_ranks()
    for experiment in experiments:
        needs.find(experiment)
    needs.prepare()
    needs.make()
    runs = needs.known(previous_run(experiments, outputs_folder()))
    del experiments
    return _launch(app, cfg, sweep_dir, SweepJob(trust, optimizing=jobs is None, runs=runs))


def _asked(app: App, cfg: DictConfig, overrides: list[str]) -> Composition:
    shared: Any = OmegaConf.to_container(cfg.hydra.overrides.hydra)
    return Composition(app, cfg.hydra.job.config_name, [*shared, *overrides])


def _validated(app: App, cfg: DictConfig, jobs: list[list[str]], names: list[str]) -> list[Experiment]:
    """The experiment of each job; raises SpecError with the mistakes of the first that is refused."""
    experiments = list[Experiment]()
    run_dirs = dict[Path, int]()
    for number, overrides in enumerate(jobs):
        try:
            with explained(_asked(app, cfg, overrides)):
                job = app.job_config(cfg, overrides, number)
            experiment = parse_experiment(plain_job(job))
            if not task_of(experiment).shows:
                run_dir = unused_run_dir(job, "hydra.sweep.dir")
                _refuse_outside(run_dir, job)
                _refuse_shared(run_dir, run_dirs.setdefault(run_dir, number), number)
        except SpecError as error:
            raise _in_job(error, f"job #{number} ({names[number]})") from error
        experiments.append(experiment)
    return experiments


def _job_config(app: App, cfg: DictConfig, number: int, overrides: list[str]) -> dict[str, Any]:
    with explained(_asked(app, cfg, overrides)):
        return plain_job(app.job_config(cfg, overrides, number))


def _refuse_outside(run_dir: Path, job: DictConfig) -> None:
    """Refuse a `subdir` that leaves the directory of the sweep by what a value in it says, such as ``../..``."""
    typed = str(OmegaConf.to_container(job.hydra.sweep, resolve=False)["subdir"])  # type: ignore[call-overload, index]
    if "${" in typed and not run_dir.is_relative_to(Path(str(job.hydra.sweep.dir)).absolute()):
        what = f"{typed} leads to {run_dir}, outside the directory of the sweep"
        raise SpecError([Problem("hydra.sweep.subdir", what, "let it hold ${hydra.job.num}")])


def _refuse_shared(run_dir: Path, first: int, number: int) -> None:
    if first != number:
        what = f"job #{first} has the same directory, {run_dir}"
        raise SpecError([Problem("hydra.sweep.subdir", what, "let it hold ${hydra.job.num}")])


def _in_job(error: SpecError, job: str) -> SpecError:
    return SpecError([Problem(f"{job}: {each.where}", each.what, each.hint) for each in error.errors])


def _show(experiments: list[Experiment], names: list[str], trust: frozenset[str]) -> int:
    from hookrun import tasks

    for number, (experiment, name) in enumerate(zip(experiments, names, strict=True)):
        if name:
            print(f"#{number}: {name}")
        tasks.show(tasks.prepare(experiment, trust=trust))
        release_memory()
    return DONE


def _launch(app: App, cfg: DictConfig, sweep_dir: Path, job: SweepJob) -> int:
    before = _statuses(sweep_dir)
    try:
        return _run_jobs(app, cfg, sweep_dir, job, before)
    finally:
        if _statuses(sweep_dir) != before:  # an interrupted sweep has a page as well
            make_page(sweep_dir)


def _run_jobs(app: App, cfg: DictConfig, sweep_dir: Path, job: SweepJob, before: dict[Path, int]) -> int:
    try:
        returned = app.sweep_checked(cfg, job)
    except (HydraException, OmegaConfBaseException, ImportError, OSError) as error:
        # Jobs raise nothing: this exception comes from a sweeper, a launcher or a directory.
        with explained(_asked(app, cfg, [])):
            raise error
    codes = dict(_returned(returned)) if not job.optimizing else _written(sweep_dir, before)
    failed = {run_dir: code for run_dir, code in codes.items() if code != DONE}
    print(f"sweep: {len(codes) - len(failed)} of {len(codes)} jobs done, in {sweep_dir}")
    for run_dir, code in failed.items():
        print(f"  exit code {code}: {run_dir}")
    return most_serious(codes.values())


def _returned(batches: list[list[JobReturn]]) -> Iterator[tuple[str, int]]:
    for batch in batches:
        for job in batch:
            yield str(job.hydra_cfg.hydra.runtime.output_dir), int(job.return_value)  # type: ignore[union-attr]


def _written(sweep_dir: Path, before: dict[Path, int]) -> dict[str, int]:
    """The exit codes that this sweep's jobs left on disk: an optimizing sweeper does not pass on what they returned."""
    changed = [path for path, time in _statuses(sweep_dir).items() if before.get(path) != time]
    codes = {path: json.loads(path.read_text(encoding="utf-8")).get("exit_code") for path in changed}
    return {str(path.parent): FAILED if code is None else int(code) for path, code in sorted(codes.items())}


def _statuses(sweep_dir: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sweep_dir.rglob("status.json")}

"""A layer between a sweeper and its launcher: it decides which jobs run, in which directories, and keeps exit codes."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hookrun.command.compose.hydra import BASIC_LAUNCHER, App, BasicLauncher
from hookrun.command.sweeps.composed_jobs import SUBDIR, ComposedJob, composed_job, subdir_override
from hookrun.command.sweeps.exit_codes import DONE, exit_code
from hookrun.command.sweeps.jobs import NOT_STARTED, JobFailed, SweepJob, make_missing_page
from hookrun.command.sweeps.needs import NeededRuns
from hookrun.command.sweeps.resumed import JobDirectories
from hookrun.errors import HookrunError, listed
from hookrun.store.format import STATUS

log = logging.getLogger(BasicLauncher.__module__)
"""The logger of Hydra's launcher, so that the log lines look the same."""

MOST_LISTED = 8
Overrides = Sequence[str]


class SweepStopped(JobFailed):
    """A job, whose directory this exception has, failed in a sweep with `fail_fast`: no other job starts."""

    def __str__(self) -> str:
        return f"stopped at the first failed job (fail_fast): job {self.args[0]}"


class SweepRun(Launcher):
    """One start of a sweep, which the sweeper takes for its launcher. The inner launcher may be pickled.

    cfg:       its configuration
    sweep_dir: the directory of the sweep
    job:       what runs each of its jobs
    earlier:   the jobs in the directory of a resumed sweep; None for a new sweep
    needs:     the runs that its jobs need
    is_plan:   whether ``task=plan`` was typed
    jobs:      every job of the sweep; None where the sweeper chooses them while it runs
    codes:     directory -> exit code of each launched job
    again:     the number of jobs that had finished before
    made_of:   see `composed_jobs.made_of`
    """

    made_of = ""

    def __init__(
        self,
        app: App,
        cfg: DictConfig,
        sweep_dir: Path,
        job: SweepJob,
        earlier: JobDirectories | None,
        needs: NeededRuns,
        is_plan: bool,
    ) -> None:
        self.app = app
        self.cfg = cfg
        self.sweep_dir = sweep_dir
        self.job = job
        self.earlier = earlier
        self.needs = needs
        self.is_plan = is_plan
        self.jobs: Sequence[ComposedJob] | None = None
        self._order = {override.get_key_element(): place for place, override in enumerate(app.swept(cfg))}
        self._launched = 0
        self.codes = dict[str, int]()
        self.again = 0

    def around(self, launcher: Launcher) -> SweepRun:
        """This sweep, which runs only the jobs that have not finished yet, by the given launcher."""
        self._launcher = launcher
        return self

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Does nothing: the launcher was set up when it was created."""

    def launch(self, job_overrides: Sequence[Overrides], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; returns one JobReturn for each, including those that had finished before.

        Where all jobs are earlier, they are all run when the sweeper first launches some of them.

        Raises SweepStopped after a failed job, with `fail_fast`.
        """
        first = self._launched
        jobs = self.jobs
        if jobs is None:
            jobs = self._chosen(job_overrides)
        elif first:
            return []
        self._launched += len(jobs)
        returned = {job: self._finished(job) for job in jobs if job.exit_code is not None}
        self._keep_codes(list(returned.values()))
        self.again += len(returned)
        for batch in self._batches([job for job in jobs if job.exit_code is None]):
            if is_serial(self._launcher):
                results: Sequence[JobReturn] = launch_serially(cast(BasicLauncher, self._launcher), batch)
            else:
                results = self._launcher.launch([_overrides(job) for job in batch], batch[0].number)
            returned |= dict(zip(batch, results, strict=True))
            self._keep_codes(results)
            failed = [path for path in map(_run_dir, results) if self.codes.get(path, DONE) != DONE]
            if self.job.stop is not None and failed:
                raise SweepStopped(os.path.relpath(failed[0], self.sweep_dir), self.codes[failed[0]])
        return [returned[job] for job in jobs]

    def _chosen(self, job_overrides: Sequence[Overrides]) -> list[ComposedJob]:
        """The jobs that a sweeper has just chosen."""
        jobs: list[ComposedJob] = []
        for number, overrides in enumerate(job_overrides, self._launched):
            job = composed_job(self.app, self.cfg, sorted(overrides, key=self._place))
            job.number = number
            jobs.append(job)
        if self.earlier is not None:
            self.earlier.place(jobs)
        return jobs

    def _place(self, override: str) -> int:
        """Its place as typed: the last override of a key wins, and `+` must come before its subkeys."""
        return self._order.get(override.partition("=")[0], len(self._order))

    def _batches(self, jobs: Sequence[ComposedJob]) -> Iterator[list[ComposedJob]]:
        """The jobs of each call of the launcher; with `fail_fast`, a launcher of one process gets one job at a time.

        Other launchers number the jobs of a batch without gaps. Where a configuration holds the number of its job, a
        batch ends at each gap.
        """
        serial = is_serial(self._launcher)
        by_number = not serial and any(job.has_number for job in jobs)
        most = OmegaConf.select(self.cfg, "hydra.sweeper.max_batch_size")
        most = 1 if serial and self.job.stop is not None else most
        batch = list[ComposedJob]()
        for job in sorted(jobs, key=lambda job: job.number):
            is_gap = by_number and bool(batch) and job.number != batch[-1].number + 1
            if is_gap or len(batch) == most:
                yield batch
                batch = []
            batch.append(job)
        if batch:
            yield batch

    def _finished(self, job: ComposedJob) -> JobReturn:
        """The JobReturn of a job that had finished before."""
        run_dir = self.sweep_dir / str(job.name)
        make_missing_page(run_dir)
        returned = JobReturn(hydra_cfg=_only_directory(str(run_dir)), status=JobStatus.COMPLETED)
        try:
            returned.return_value = self.job.value(run_dir, cast(int, job.exit_code))
        except HookrunError as error:
            returned.return_value = error
            returned.status = JobStatus.FAILED
        return returned

    def _keep_codes(self, results: Sequence[JobReturn]) -> None:
        """Add the exit codes of the jobs to `codes`."""
        for job in results:
            code = job._return_value  # the public property prints and raises a failure
            if job.status is JobStatus.FAILED:
                code = exit_code(code)
            elif not isinstance(code, int):  # it is the objective
                code = DONE
            if code != NOT_STARTED:
                self.codes[_run_dir(job)] = code


def _overrides(job: ComposedJob) -> list[str]:
    """The overrides with which a launcher composes the job."""
    return [*job.overrides] if job.name is None else [*job.overrides, subdir_override(job.name)]


def is_serial(launcher: Launcher) -> bool:
    """Whether it is Hydra's basic launcher, which runs the jobs one after the other in this process."""
    return f"{type(launcher).__module__}.{type(launcher).__name__}" == BASIC_LAUNCHER


def launch_serially(launcher: BasicLauncher, jobs: Sequence[ComposedJob]) -> list[JobReturn]:
    """Run composed jobs as Hydra's basic launcher does, which would compose each of them again.

    Of a job only its directory and its return value are kept: a sweep may have thousands of jobs.
    """
    config = launcher.config
    context = launcher.hydra_context
    task = launcher.task_function
    assert config is not None and context is not None and task is not None  # Hydra has set it up
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    log.info(f"Launching {len(jobs)} jobs locally")
    results: list[JobReturn] = []
    for job in jobs:
        if cast(SweepJob, task).lines is None:  # else the job prints its line when it has ended
            log.info(f"\t#{job.number} : {' '.join(filter_overrides(job.overrides))}")
        result = run_job(task, job.configuration(), "hydra.sweep.dir", SUBDIR, context)
        result.cfg = None
        result.hydra_cfg = _only_directory(_run_dir(result))
        results.append(result)
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return results


def _only_directory(run_dir: str) -> DictConfig:
    return OmegaConf.create({"hydra": {"runtime": {"output_dir": run_dir}}})


def _run_dir(job: JobReturn) -> str:
    return str(cast(Any, job.hydra_cfg).hydra.runtime.output_dir)


def interrupted(interruption: KeyboardInterrupt, sweep_dir: Path, jobs: Sequence[ComposedJob]) -> str:
    """The message about a sweep that a signal ended: the number of jobs of each status, and the jobs never started.

    jobs: those of the sweep; empty where the sweeper chooses its jobs while it runs
    """
    from hookrun.report.sweep_facts import find_jobs

    shared = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    missing: list[str] = []
    for number, job in enumerate(jobs):
        if job.exit_code is None and not (job.run_dir / STATUS).exists():
            varied = [text for text in filter_overrides(job.overrides) if text not in shared]
            missing.append(f"#{number} ({' '.join(varied)})")
    counts = Counter(job.status for job in find_jobs(sweep_dir) if job.status != "not started")
    counts["not started"] = len(missing)
    ended = ", ".join(f"{number} {status}" for status, number in counts.items() if number) or "no job started"
    message = f"sweep: {str(interruption) or 'interrupted'}: {ended}, in {sweep_dir}"
    if missing:
        message += f"\n  not started: {listed(missing, MOST_LISTED)}"
    return message

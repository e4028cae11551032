"""A layer between a sweeper and its launcher: it decides which jobs run, in which directories, and keeps exit codes."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from hookrun.compose.hydra import BASIC_LAUNCHER, App, BasicLauncher, numbered
from hookrun.errors import HookrunError, listed, spec_error
from hookrun.spec.objective import Goal
from hookrun.sweeps.composed_jobs import SUBDIR, ComposedJob, composed_job, subdir_of, subdir_override
from hookrun.sweeps.exit_codes import DONE, exit_code
from hookrun.sweeps.jobs import NOT_STARTED, JobFailed, SweepJob, make_missing_page
from hookrun.sweeps.resumed import JobDirectories, refuse_links

log = logging.getLogger(BasicLauncher.__module__)
"""The logger of Hydra's launcher, so that the log lines look the same."""

MOST_LISTED = 8
Overrides = Sequence[str]


class SweepStopped(HookrunError):
    """A job failed in a sweep with `fail_fast`, so that no other job starts. `exit_code` is the job's."""

    def __init__(self, job: str, exit_code: int) -> None:
        self.job, self.exit_code = job, exit_code
        super().__init__(job, exit_code)

    def __str__(self) -> str:
        return f"stopped at the first failed job (fail_fast): job {self.job}"


@dataclass(frozen=True)
class Start:
    """A job to run.

    place:  its index among the jobs of this launch
    number: its `hydra.job.num`
    name:   its directory, relative to the sweep's; None in a new sweep, where `hydra.sweep.subdir` gives it
    """

    place: int
    number: int
    name: str | None
    job: ComposedJob


class SweepRun(Launcher):
    """One start of a sweep, which the sweeper takes for its launcher. The inner launcher may be pickled.

    sweep_dir: the directory of the sweep
    goal:      the objective by which the sweeper chooses its jobs; None for a sweeper that does not
    known:     the jobs in the directory of a resumed sweep; None for a new sweep
    jobs:      every job of the sweep; None where the sweeper chooses them while it runs
    fail_fast: whether no job starts after one has failed
    names:     of a resumed sweep, index of a launched job -> its directory, relative to the sweep's
    codes:     directory -> exit code of each launched job
    again:     the number of jobs that had finished before
    """

    def __init__(
        self,
        app: App,
        cfg: DictConfig,
        sweep_dir: Path,
        known: JobDirectories | None,
        *,
        goal: Goal | None = None,
        fail_fast: bool = False,
        jobs: Sequence[ComposedJob] | None = None,
    ) -> None:
        self._app, self._cfg, self.known = app, cfg, known
        self.sweep_dir, self._goal, self.fail_fast, self.jobs = sweep_dir, goal, fail_fast, jobs
        self._order = {override.get_key_element(): place for place, override in enumerate(app.swept(cfg))}
        self._launched = 0
        self.names = dict[int, str]()
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

        Where all jobs are known, a baseline is run with the first job that the sweeper launches, and the sweeper gets
        the result of the same job for one that would repeat it.

        Raises SweepStopped after a failed job, with `fail_fast`.
        """
        jobs = self._jobs_of(job_overrides)
        first, self._launched = self._launched, self._launched + len(jobs)
        returned = dict[int, JobReturn]()
        for batch in self._batches(jobs, first, returned):
            if is_serial(self._launcher):
                results: Sequence[JobReturn] = launch_serially(cast(BasicLauncher, self._launcher), batch)
            else:
                overrides = [
                    [*start.job.overrides, *([] if start.name is None else [subdir_override(start.name)])]
                    for start in batch
                ]
                results = self._launcher.launch(overrides, batch[0].number)
            returned |= {start.place: result for start, result in zip(batch, results, strict=True)}
            self._keep_codes(results)
            failed = [path for path in map(_run_dir, results) if self.codes.get(path, DONE) != DONE]
            if self.fail_fast and failed:
                raise SweepStopped(os.path.relpath(failed[0], self.sweep_dir), self.codes[failed[0]])
        return [returned[place] for place in sorted(returned)]

    def _jobs_of(self, job_overrides: Sequence[Overrides]) -> list[ComposedJob]:
        """The jobs to run for those that the sweeper launches."""
        if self.jobs is not None:
            waiting = list(self.jobs[self._launched :])
            asked = [tuple(each) for each in job_overrides]
            places = (place for place, job in enumerate(waiting) if tuple(job.overrides) in asked)
            return waiting[: max(places, default=-1) + 1]

        # the last override of a key wins, and `+` must come before its subkeys
        def typed_place(text: str) -> int:
            return self._order.get(text.partition("=")[0], len(self._order))

        return [composed_job(self._app, self._cfg, sorted(each, key=typed_place)) for each in job_overrides]

    def _batches(
        self, jobs: Sequence[ComposedJob], first: int, returned: dict[int, JobReturn]
    ) -> Iterator[list[Start]]:
        """The jobs of each call of the launcher; with `fail_fast`, a launcher of one process gets one job at a time.

        Other launchers number the jobs of a batch without gaps. Where a configuration holds the number of its job, a
        batch ends at each gap.
        """
        serial = is_serial(self._launcher)
        if self.known is None:
            starts = [Start(place, first + place, None, job) for place, job in enumerate(jobs)]
        else:
            starts = self._unfinished(self.known, jobs, first, returned)
        by_number = not serial and any(start.job.has_number for start in starts)
        batch = list[Start]()
        for start in starts:
            is_gap = bool(batch) and start.number != batch[-1].number + 1
            if batch and ((serial and self.fail_fast) or (is_gap and by_number)):
                yield batch
                batch = []
            batch.append(start)
        if batch:
            yield batch

    def _unfinished(
        self,
        known: JobDirectories,
        jobs: Sequence[ComposedJob],
        first: int,
        returned: dict[int, JobReturn],
    ) -> list[Start]:
        """The jobs that have not finished.

        returned: receives the JobReturn of each job that has finished, by its index in `jobs`
        """
        starts, new = list[Start](), list[tuple[int, DictConfig]]()
        for place, job in enumerate(jobs):
            before = known.take(job.config)
            if before is None:
                new.append((place, job.configuration(first + place)))
            elif before.exit_code is None:
                number = int(before.name) if before.name.isdecimal() else first + place
                starts.append(Start(place, number, before.name, job))
            else:
                returned[place] = self._finished(before.name, before.exit_code)
                self.names[first + place] = before.name
        self._keep_codes(list(returned.values()))
        self.again += len(returned)
        # first those whose own directory is free
        for place, config in sorted(new, key=lambda each: subdir_of(each[1]) in known.used):
            number, name = _free_directory(known, config, first + place)
            starts.append(Start(place, number, name, jobs[place]))
        for start in starts:
            assert start.name is not None
            refuse_links(self.sweep_dir, start.name)
            self.names[first + start.place] = start.name
        return sorted(starts, key=lambda start: start.number)

    def _finished(self, name: str, code: int) -> JobReturn:
        """The JobReturn of a job that had finished before."""
        from hookrun import tasks

        run_dir = self.sweep_dir / name
        make_missing_page(run_dir)
        job = JobReturn(hydra_cfg=_only_directory(str(run_dir)), status=JobStatus.COMPLETED)
        job.return_value = code
        if self._goal is not None:
            try:
                if code != DONE:
                    raise JobFailed(f"job failed with exit code {code}: {run_dir}", code)
                job.return_value = tasks.objective(run_dir)
            except HookrunError as error:
                job.return_value, job.status = error, JobStatus.FAILED
        return job

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


def is_serial(launcher: Launcher) -> bool:
    """Whether it is Hydra's basic launcher, which runs the jobs one after the other in this process."""
    return f"{type(launcher).__module__}.{type(launcher).__name__}" == BASIC_LAUNCHER


def launch_serially(launcher: BasicLauncher, starts: Iterable[Start]) -> list[JobReturn]:
    """Run composed jobs as Hydra's basic launcher does, which would compose each of them again.

    Of a job only its directory and its return value are kept: a sweep may have thousands of jobs.
    """
    config, context, task = launcher.config, launcher.hydra_context, launcher.task_function
    assert config is not None and context is not None and task is not None  # Hydra has set it up
    starts = list(starts)
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    log.info(f"Launching {len(starts)} jobs locally")
    results = list[JobReturn]()
    for start in starts:
        if cast(SweepJob, task).lines is None:  # else the job prints its line when it has ended
            log.info(f"\t#{start.number} : {' '.join(filter_overrides(start.job.overrides))}")
        cfg = start.job.configuration(start.number, start.name)
        job = run_job(task, cfg, "hydra.sweep.dir", SUBDIR, context)
        job.cfg, job.hydra_cfg = None, _only_directory(_run_dir(job))
        results.append(job)
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return results


def _free_directory(known: JobDirectories, config: DictConfig, number: int) -> tuple[int, str]:
    """The number and directory of a job that was not started before: its index, or the next whose directory is free."""
    while (name := subdir_of(numbered(config, number))) in known.used:
        number += 1
        if subdir_of(numbered(config, number)) == name:
            raise spec_error(
                SUBDIR,
                f"{name} is the directory of a job with another configuration",
                "let it hold ${hydra.job.num}",
            )
    known.used.add(name)
    return number, name


def _only_directory(run_dir: str) -> DictConfig:
    return OmegaConf.create({"hydra": {"runtime": {"output_dir": run_dir}}})


def _run_dir(job: JobReturn) -> str:
    return str(cast(Any, job.hydra_cfg).hydra.runtime.output_dir)


def interrupted(
    interruption: KeyboardInterrupt,
    sweep_dir: Path,
    jobs: Sequence[Overrides] | None,
    names: Mapping[int, str] | None = None,
) -> str:
    """The message about a sweep that a signal ended: the number of jobs of each status, and the jobs never started.

    jobs:  the overrides of each job; None where the sweeper chooses its jobs while it runs
    names: of a resumed sweep, job index -> directory of the job; None for a new sweep
    """
    from hookrun.report.sweep_facts import find_jobs

    statuses = {job.name: job.status for job in find_jobs(sweep_dir) if job.status != "not started"}
    counts, missing = Counter(statuses.values()), list[int]()
    if jobs is not None:
        counts["not started"] = max(len(jobs) - len(statuses), 0)
        # else the name of a directory does not give the index of its job
        if names is not None or all(map(str.isdecimal, statuses)):
            by_place = dict(enumerate(map(str, range(len(jobs))))) if names is None else names
            missing = [place for place in range(len(jobs)) if by_place.get(place) not in statuses]
            counts["not started"] = len(missing)
    ended = ", ".join(f"{number} {status}" for status, number in counts.items() if number) or "no job started"
    message = f"sweep: {str(interruption) or 'interrupted'}: {ended}, in {sweep_dir}"
    if jobs is None or not missing:
        return message
    shared = set.intersection(*map(set, jobs))
    labels = [
        f"#{place} ({' '.join(text for text in filter_overrides(jobs[place]) if text not in shared)})"
        for place in missing
    ]
    return f"{message}\n  not started: {listed(labels, MOST_LISTED)}"

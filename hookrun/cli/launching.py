"""A layer between a sweeper and its launcher: it decides which jobs run, in which directories, and keeps exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hookrun.cli.exit_codes import DONE, exit_code
from hookrun.cli.hydra import BASIC_LAUNCHER, App, numbered
from hookrun.cli.in_turn import in_turn
from hookrun.cli.job_directories import JobDirectories, refuse_links
from hookrun.cli.job_hash import JobHashes
from hookrun.cli.jobs import NOT_STARTED, JobFailed, make_missing_page
from hookrun.cli.study import Study
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.spec.objective import Goal

SUBDIR = "hydra.sweep.subdir"
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
    name:   its directory, relative to the sweep's
    """

    place: int
    number: int
    name: str
    overrides: Overrides


class Launching:
    """The jobs of one start of a sweep. The sweeper gets `over(launcher)` instead of its launcher.

    sweep_dir: the directory of the sweep
    goal:      the objective by which the sweeper chooses its jobs; None for a sweeper that does not
    known:     the jobs in the directory of a resumed sweep; None for a new sweep
    hashes:    the hashes that identify the jobs
    fail_fast: whether no job starts after one has failed
    added:     the overrides of jobs that run before those of the sweeper, such as baselines
    names:     of a resumed sweep, index of a launched job -> its directory, relative to the sweep's
    codes:     directory -> exit code of each launched job
    again:     the number of jobs that were over before
    """

    def __init__(
        self,
        app: App,
        cfg: DictConfig,
        sweep_dir: Path,
        known: JobDirectories | None,
        hashes: JobHashes,
        *,
        goal: Goal | None,
        fail_fast: bool,
        added: Sequence[Overrides] = (),
    ) -> None:
        self._app, self._cfg, self._known, self._hashes = app, cfg, known, hashes
        self.sweep_dir, self._goal, self.fail_fast, self._added = sweep_dir, goal, fail_fast, added
        typed = app.swept(cfg)
        self._order = {override.get_key_element(): place for place, override in enumerate(typed)}
        self._fixed = {each.get_key_element() for each in typed if not each.is_sweep_override()}
        self._study = None if goal is None else Study(sweep_dir)
        self.names = dict[int, str]()
        self.codes = dict[str, int]()
        self.again = 0

    @property
    def left(self) -> int:
        """The number of jobs in the directory that the sweeper did not launch."""
        return 0 if self._known is None else self._known.left

    def over(self, launcher: Launcher) -> Launcher:
        """A launcher around the given one, which runs only the jobs that are not over yet."""
        return _Over(in_turn(launcher), self)

    def launched(
        self, launcher: Launcher, job_overrides: Sequence[Overrides], first: int
    ) -> Sequence[JobReturn]:
        """Run the jobs; returns one JobReturn for each, including those that were over before.

        first: the number of the first job

        Raises SweepStopped after a failed job, with `fail_fast`.
        """
        added = self._added if first == 0 else ()
        first += len(self._added) - len(added)
        jobs = [self._ordered(each) for each in (*added, *job_overrides)]
        returned = dict[int, JobReturn]()
        for batch in self._batches(jobs, first, returned):
            placed = [self._placed(start) for start in batch]
            found = launcher.launch(placed, batch[0].number)
            returned |= {start.place: each for start, each in zip(batch, found, strict=True)}
            self._keep(found)
            if self.fail_fast and (failed := self._failed(found)):
                raise SweepStopped(os.path.relpath(failed, self.sweep_dir), self.codes[failed])
        self._tell(jobs, [returned[place] for place in range(len(jobs))])
        return [returned[place] for place in range(len(added), len(jobs))]

    def _tell(self, jobs: list[list[str]], returned: Sequence[JobReturn]) -> None:
        """Add the jobs to the study of a sweeper that chooses its jobs by their objective."""
        if self._study is None:
            return
        for overrides, job in zip(jobs, returned, strict=True):
            pairs = (text.partition("=") for text in overrides)
            params = {key.lstrip("+"): value for key, _, value in pairs if key not in self._fixed}
            value = None if job.status is JobStatus.FAILED else float(job._return_value)
            self._study.add(os.path.relpath(_run_dir(job), self.sweep_dir), params, value)

    def _ordered(self, overrides: Overrides) -> list[str]:
        """The overrides in the typed order: the last override of a key wins, and `+` must come before its subkeys."""
        end = len(self._order)
        return sorted(overrides, key=lambda text: self._order.get(text.partition("=")[0], end))

    def _batches(
        self, jobs: list[list[str]], first: int, returned: dict[int, JobReturn]
    ) -> Iterator[list[Start]]:
        """The jobs of each call of the launcher; with `fail_fast`, a launcher of one process gets one job at a time.

        A launcher numbers the jobs of a batch without gaps. Where a configuration holds the number of its job, a batch
        ends at each gap.
        """
        in_turn = self._cfg.hydra.launcher.get("_target_") == BASIC_LAUNCHER
        if self._known is None:
            starts = [Start(place, first + place, "", each) for place, each in enumerate(jobs)]
            by_number = False
        else:
            starts, by_number = self._to_run(self._known, jobs, first, returned)
        batch = list[Start]()
        for start in starts:
            is_next = not batch or start.number == batch[-1].number + 1 or not (in_turn or by_number)
            if batch and (not is_next or (in_turn and self.fail_fast)):
                yield batch
                batch = []
            batch.append(start)
        if batch:
            yield batch

    def _to_run(
        self, known: JobDirectories, jobs: list[list[str]], first: int, returned: dict[int, JobReturn]
    ) -> tuple[list[Start], bool]:
        """The jobs that are not over, and whether the configuration of any job holds its number.

        returned: receives the JobReturn of each job that is over, by its index in `jobs`
        """
        found = [known.take(self._hashes.of(overrides)) for overrides in jobs]
        starts, by_number = list[Start](), False
        new = list[tuple[int, DictConfig]]()
        for place, (job, overrides) in enumerate(zip(found, jobs, strict=True)):
            if job is not None and job.exit_code is not None:
                returned[place] = self._over(job.name, job.exit_code)
                self.names[first + place] = job.name
                continue
            config = self._app.job_config(self._cfg, overrides, first + place)
            by_number = by_number or "${hydra:job." in _users_text(config)
            if job is None:
                new.append((place, config))
            else:
                number = int(job.name) if job.name.isdecimal() else first + place
                starts.append(Start(place, number, job.name, overrides))
        self._keep(list(returned.values()))
        self.again += len(returned)
        new.sort(
            key=lambda each: not known.is_free(_subdir(each[1]))
        )  # first those whose own directory is free
        starts += [self._new(known, config, place, first, jobs[place]) for place, config in new]
        for start in starts:
            refuse_links(self.sweep_dir, start.name)
            self.names[first + start.place] = start.name
        return sorted(starts, key=lambda start: start.number), by_number

    def _new(
        self, known: JobDirectories, config: DictConfig, place: int, first: int, overrides: Overrides
    ) -> Start:
        """A job that was not started before, numbered by its index, or by the next number whose directory is free."""
        number = first + place
        while not known.is_free(name := _subdir(numbered(config, number))):
            number += 1
            if _subdir(numbered(config, number)) == name:
                what = f"{name} is the directory of a job with another configuration"
                raise SpecError([Problem(SUBDIR, what, "let it hold ${hydra.job.num}")])
        known.use(name)
        return Start(place, number, name, overrides)

    def _placed(self, start: Start) -> list[str]:
        """The overrides of a job; in a resumed sweep, also the override that sets its directory."""
        if self._known is None:
            return list(start.overrides)
        name = start.name.replace("${", "\\${")
        return [*start.overrides, f"{SUBDIR}={QuotedString(name, Quote.single).with_quotes()}"]

    def _over(self, name: str, code: int) -> JobReturn:
        """The JobReturn of a job that is over."""
        run_dir = self.sweep_dir / name
        make_missing_page(run_dir)
        hydra = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(run_dir)}}})
        job = JobReturn(hydra_cfg=hydra, status=JobStatus.COMPLETED)
        try:
            job.return_value = self._value(run_dir, code)
        except HookrunError as error:
            job.return_value, job.status = error, JobStatus.FAILED
        return job

    def _value(self, run_dir: Path, code: int) -> int | float:
        from hookrun import tasks

        if self._goal is None:
            return code
        if code != DONE:
            raise JobFailed(str(run_dir), code)
        return tasks.objective(run_dir)

    def _keep(self, found: Sequence[JobReturn]) -> None:
        """Add the exit codes of the jobs to `codes`."""
        for job in found:
            value = job._return_value  # the public property prints and raises a failure
            ended = value if isinstance(value, int) else DONE  # else it is the objective
            code = exit_code(value) if job.status is JobStatus.FAILED else ended
            if code != NOT_STARTED:
                self.codes[_run_dir(job)] = code

    def _failed(self, found: Sequence[JobReturn]) -> str | None:
        """The directory of the first job that failed, if any."""
        return next((path for path in map(_run_dir, found) if self.codes.get(path, DONE) != DONE), None)


class _Over(Launcher):
    """A launcher whose jobs `Launching` filters. The inner launcher may be pickled, and is not changed."""

    def __init__(self, launcher: Launcher, launching: Launching) -> None:
        self._launcher, self._launching = launcher, launching

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Does nothing: the launcher was set up when it was created."""

    def launch(self, job_overrides: Sequence[Overrides], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; returns one JobReturn for each."""
        return self._launching.launched(self._launcher, job_overrides, initial_job_idx)


def _run_dir(job: JobReturn) -> str:
    return str(job.hydra_cfg.hydra.runtime.output_dir)  # type: ignore[union-attr]


def _subdir(config: DictConfig) -> str:
    """The directory of a job, relative to the sweep's."""
    return os.path.normpath(str(config.hydra.sweep.subdir))


def _users_text(config: DictConfig) -> str:
    """The user's part of a configuration as text, unresolved."""
    return OmegaConf.to_yaml(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))

"""The needs of an experiment: composed by name and run before it, unless a finished run of the same hash exists.

The run of a need is in ``outputs/needs/<hash>/<time>``; the hash is of its resolved configuration and of the files that
the configuration names. One process at a time makes the run. An unfinished run of a killed process is never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig

from hookrun.command.compose import hydra_section
from hookrun.command.compose.compose import place_run, plain_run
from hookrun.command.compose.errors import composed
from hookrun.command.compose.hydra import Composition, conf_dir, opened, parse_override
from hookrun.command.compose.loader import options
from hookrun.command.sweeps.jobs import JobFailed, free_job_memory, near_path, run_alone
from hookrun.engine.keys import root_of
from hookrun.errors import Problem, Refusal, nearest, refuse, refused_at, spec_error
from hookrun.report.sweep_facts import record_in
from hookrun.run import tasks
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import PREVIOUS, Need, runs_of
from hookrun.store.format import STATUS
from hookrun.store.named_files import named_files
from hookrun.store.records import Status
from hookrun.store.run_dir import newest_finished, newest_unchanged, outputs_folder
from hookrun.version import __version__

FOLDER = "needs"
MOST_NEEDED = 64
"""The most different needs of one command."""


@dataclass(frozen=True)
class ComposedNeed:
    """A composed need.

    where:  the key path that names it first
    cfg:    its configuration, including `hydra`
    folder: the directory that holds its runs
    """

    where: str
    need: Need
    cfg: DictConfig
    experiment: Experiment
    folder: Path


@dataclass(eq=False)
class NeededRuns:
    """The runs that the experiments of one command need.

    command:  the command line; only its config folders and `hydra.searchpath` are used
    trust:    packages that a user's own code may come from
    resumes:  whether the command resumes a run, which does not store the folders
    made:     need -> the directory of its run, found or made; None: it has not been run yet
    previous: the directory of the run before, see `previous_run`
    """

    command: Composition
    trust: frozenset[str]
    resumes: bool = False
    made: dict[Need, str | None] = field(default_factory=dict, init=False)
    previous: str | None = field(default=None, init=False)
    _needed: dict[Need, ComposedNeed] = field(default_factory=dict, init=False)

    def find_all(self, experiments: Collection[Experiment], folder: Path) -> None:
        """Find the runs that exist already: those of all needs, and the run before in `folder`. Raises SpecError."""
        self.previous = previous_run(experiments, folder)
        for experiment in experiments:
            self.find(experiment)

    def given_to(self, experiment: Experiment) -> Experiment:
        """The experiment with the directories of the runs that it names."""
        return experiment.with_runs(self.made, self.previous)

    def find(self, experiment: Experiment) -> None:
        """Compose the needs of the experiment, and look for their finished runs.

        Raises SpecError, also for a need which itself needs a run that is not named before it.
        """
        before: list[Need] = []
        for name, need in experiment.settings.needs.items():
            where = f"needs.{name}"
            before.append(need)
            if need in self._needed:
                continue
            if len(self._needed) >= MOST_NEEDED:
                raise spec_error(
                    where, f"there are more than {MOST_NEEDED} different needs", "need fewer runs"
                )
            cfg, config, needed = self._composed(where, need)
            theirs = needed.settings.needs
            with _named(where, need):
                _refuse_unnamed(theirs, before[:-1])
            inner = [self._needed[each].folder.name for each in theirs.values()]
            folder = outputs_folder() / FOLDER / _digest(config, needed, inner)
            self._needed[need] = ComposedNeed(where, need, cfg, needed, folder)
            run_dir = newest_unchanged(folder)
            self.made[need] = None if run_dir is None else str(run_dir)

    @property
    def missing(self) -> bool:
        """Whether a need is still to be run."""
        return None in self.made.values()

    def prepare(self, *, shows: bool = False) -> None:
        """Compile the needs that have not been run yet, as far as possible before they run.

        shows: whether to print the plan of each

        Raises SpecError and CompileError.
        """
        for need, needed in self._needed.items():
            if shows:
                print(self._line(needed))
            if self.made[need] is None:
                ready = self._prepared(needed)
                if shows and tasks.task_of(needed.experiment).has_plan:
                    ready.task.show(ready)
                free_job_memory()

    def make(self) -> None:
        """Run the needs that have not been run yet, in the order in which they are named. Raises JobFailed."""
        for need, needed in self._needed.items():
            if self.made[need] is None:
                self.made[need] = self._made(needed)
            else:
                print(self._line(needed), flush=True)

    # ---- composing -------------------------------------------------------------------------------------------------

    def _composed(self, where: str, need: Need) -> tuple[DictConfig, dict[str, Any], Experiment]:
        names = options(self.command.repository, "experiment")
        if need.experiment not in names:
            hint = nearest(need.experiment, names)
            if self.resumes:
                hint = "type --config-dir again, if the run had one"
            raise spec_error(f"{where}.experiment", f"there is no experiment {need.experiment!r}", hint)
        refuse(self._wrong_overrides(f"{where}.overrides", need.overrides))
        chosen = f"experiment={need.experiment}"
        if parse_override(chosen).value() != need.experiment:
            chosen = f"experiment='{need.experiment}'"
        command = replace(self.command, overrides=[*self.command.search, chosen, *need.overrides])
        with _named(where, need):
            cfg = composed(command)
            if cfg.hydra.mode == RunMode.MULTIRUN:
                raise spec_error("hydra.mode", "is a sweep, and a need is one run", "need another experiment")
            place_run(cfg, outputs_folder() / FOLDER)  # the same for every command, for its hash
            config = plain_run(cfg)
            experiment = tasks.parse_experiment(config)
            if tasks.task_of(experiment).shows:
                raise spec_error(
                    "task",
                    f"task={experiment.settings.task.name} does not make a run directory",
                    "need a task that is run, such as predict",
                )
        return cfg, config, experiment

    def _wrong_overrides(self, where: str, overrides: Iterable[str]) -> Iterator[Problem]:
        """The problems of overrides that a need may not have: it may only set keys of the experiment that it names."""
        groups = {*self.command.repository.get_group_options("", ObjectType.GROUP)} - {"experiment"}
        for text in overrides:
            key, _, value = text.partition("=")
            if root_of(text) == "experiment":
                yield Problem(
                    f"{where}: {text[:100]!r}", "names another experiment", "name it in `experiment`"
                )
            else:
                yield from hydra_section.wrong_params({key: value}, where, groups, "set in a need")

    # ---- running ---------------------------------------------------------------------------------------------------

    def _prepared(self, needed: ComposedNeed) -> tasks.Ready:
        with _named(needed.where, needed.need):
            return tasks.prepare(needed.experiment.with_runs(self.made), trust=self.trust)

    def _made(self, needed: ComposedNeed) -> str:
        from hookrun.store.lock import locked

        waits = f"{needed.where}: another process runs it; waiting for {needed.folder}"
        with locked(needed.folder, lambda: print(waits, flush=True)):
            if (made := newest_unchanged(needed.folder)) is not None:  # by another process meanwhile
                return str(made)
            print(self._line(needed), flush=True)
            run_dir = needed.folder / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
            place_run(needed.cfg, run_dir)
            plain_run(needed.cfg)
            run = partial(run_alone, prepared=self._prepared(needed), latest=False)
            code = int(self.command.app.run_checked(needed.cfg, run).return_value)
            free_job_memory()
            if code:
                what = f"{needed.where}: {needed.need} ended with exit code {code}"
                if reason := record_in(run_dir / STATUS, Status).get("reason"):
                    what += f": {reason}"
                raise JobFailed(f"{what}\n    its run directory: {run_dir}", code)
        return str(run_dir)

    def _line(self, needed: ComposedNeed) -> str:
        made = self.made[needed.need]
        how = "runs first" if made is None else "used again"
        place = near_path(Path(made or needed.folder))
        return f"needs: {needed.where.removeprefix('needs.')} = {needed.need} → {place} ({how})"


def _refuse_unnamed(needs: Mapping[str, Need], before: Sequence[Need]) -> None:
    """Raise SpecError if a run that a need needs is not among the needs named before it."""
    refuse(
        Problem(
            f"needs.{name}",
            f"is {need}, which is not among the needs named before this one",
            "name it before, or run it first and name its directory in place of this need: {run: outputs/…}",
        )
        for name, need in needs.items()
        if need not in before
    )


def with_made_needs(
    experiment: Experiment, overrides: Sequence[str], config_dir: Path | None, trust: frozenset[str]
) -> Experiment:
    """The experiment with the existing runs of its needs, and None for each other need. Runs nothing.

    overrides:  the overrides with which the experiment was composed
    config_dir: the user's config folder, which is searched first; None: only hookrun's

    Raises SpecError.
    """
    with opened(conf_dir(), *([] if config_dir is None else [config_dir])) as app:
        needs = NeededRuns(Composition(app, "config", list(overrides)), trust)
        needs.find(experiment)
    return experiment.with_runs(needs.made)


def previous_run(experiments: Iterable[Experiment], folder: Path) -> str | None:
    """The newest finished run in `folder` if one of the experiments refers to the previous run; else None.

    Raises SpecError if an experiment refers to it and `folder` has no finished run.
    """
    for experiment in experiments:
        for where, run in _named_runs(experiment):
            if run == PREVIOUS:
                with refused_at(where):
                    return str(newest_finished(folder))
    return None


def _named_runs(experiment: Experiment) -> Iterator[tuple[str, str | None]]:
    """Key path and name of every run that the experiment names."""
    for key in ("run", "other"):
        yield f"task.{key}", getattr(experiment.settings.task, key, None)
    yield from runs_of(experiment.settings).items()
    for hook in experiment.hooks.hooks:
        if hook.keys.enabled:
            yield from ((f"{where}.run", value.run) for where, value in hook.run_values())


@contextmanager
def _named(where: str, need: Need) -> Iterator[None]:
    """Prefix every problem that is raised in the block with the key path of the need."""
    try:
        yield
    except Refusal as error:
        problems = [replace(each, where=f"{where} ({need}): {each.where}") for each in error.errors]
        raise type(error)(problems) from error


def _digest(config: Mapping[str, Any], experiment: Experiment, needs: list[str]) -> str:
    """The hash of hookrun's version, the configuration, the files that it names, its needs and the previous run."""
    identity = {
        "hookrun": __version__,
        "config": config,
        "needs": needs,
        "files": named_files(config),
        "previous": previous_run([experiment], outputs_folder()),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]

"""Execute a command line that asks for a plan, a run or a sweep."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hookrun import tasks
from hookrun.cli.check import Composition
from hookrun.cli.compose import claimed, parsed_run, plain_run, planned, unused_run_dir
from hookrun.cli.errors import explained
from hookrun.cli.exit_codes import DONE
from hookrun.cli.gc_control import import_torch
from hookrun.cli.jobs import SingleRun, make_missing_page
from hookrun.cli.logs import sweep_lines
from hookrun.cli.needs import NeededRuns, previous_run
from hookrun.cli.origins import origins_told
from hookrun.cli.ranks import RefusedByMain, agreed, follow, ranks_of, refuse_needs
from hookrun.cli.resume import composed_again, remove_left_states, run_folder, state_of_run
from hookrun.cli.typed import Resume
from hookrun.cli.waiting import wait_is_over, waiting_for
from hookrun.errors import Problem, SpecError
from hookrun.ranks.alone import ALONE, Ranks, is_main
from hookrun.spec import Experiment
from hookrun.store.format import JOB, State

DONE_STATE: State = "done"


@dataclass(frozen=True)
class SweepMode:
    """The typed settings that apply to sweeps only.

    go_on:     whether the sweep is resumed, so that its directory holds jobs already
    anyway:    whether jobs are resumed even if their states are of another model, data or version
    fail_fast: whether no job starts after one has failed
    """

    go_on: bool = False
    anyway: bool = False
    fail_fast: bool = False


def run_sweep(asked: Composition, cfg: DictConfig, trust: frozenset[str], of_sweep: SweepMode) -> int:
    """Check what was composed, then run the sweep."""
    from hookrun.cli.sweep import sweep

    waiting_for("checking the jobs of the sweep")
    with sweep_lines(cfg):
        return sweep(asked.app, cfg, trust, **vars(of_sweep))


def resumed(asked: Composition, trust: frozenset[str], resume: Resume) -> int:
    """Resume an unfinished run; returns the exit code."""
    folder = run_folder(resume.name)
    if _is_done(folder):
        if is_main():
            remove_left_states(folder)
            make_missing_page(folder)
        return DONE
    shown = [f"task={name}" for name, task in tasks.tasks().items() if task.shows]
    if typed := [text for text in asked.overrides if text in shown]:
        what = f"{typed[0]} does not make a run that could be resumed"
        raise SpecError([Problem("resume", what, "leave one of them out")])
    with composed_again(asked, folder, anyway=resume.anyway) as (again, cfg):
        return run_once(again, cfg, parsed_run(cfg), trust, resume, folders=asked)


def _is_done(folder: Path) -> bool:
    is_done = state_of_run(folder) == DONE_STATE
    if is_done and is_main():
        print(f"{folder} is done: there is nothing to resume")
    return is_done


def run_once(
    asked: Composition,
    cfg: DictConfig,
    experiment: Experiment,
    trust: frozenset[str],
    resume: Resume | None = None,
    folders: Composition | None = None,
) -> int:
    """Check one run, then show it or run it; returns the exit code.

    experiment: what `cfg` describes
    folders: what was typed, which names the folders where needs are found; None: `asked`. A stored configuration has
             no other experiments beside it.
    """
    shows = tasks.task_of(experiment).shows
    if experiment.settings.baseline and not shows and is_main():
        print("NOTE: baseline: true is for sweeps (-m), which then run without hooks too; this is one run")
    if shows and not is_main():  # rank 0 shows it
        return DONE
    with nullcontext(ALONE) if shows else ranks_of(experiment) as ranks:
        try:
            needs = NeededRuns(folders or asked, trust, resumes=resume is not None)
            return _checked_and_run(asked, cfg, trust, resume, experiment, ranks, needs)
        except RefusedByMain as refused:
            return refused.exit_code


def _checked_and_run(
    asked: Composition,
    cfg: DictConfig,
    trust: frozenset[str],
    resume: Resume | None,
    experiment: Experiment,
    ranks: Ranks,
    needs: NeededRuns,
) -> int:
    """Check everything, then show it or run it; returns the exit code. Every rank calls this function."""
    config, shows = plain_run(cfg), tasks.task_of(experiment).shows

    def composed(overrides: list[str]) -> dict[str, Any]:
        with explained(asked):
            return plain_run(asked.app.compose_config(asked.config_name, overrides, asked.mode))

    import_torch()
    waiting_for("building the model and checking the hooks")
    with agreed(ranks), origins_told(cfg), tasks.in_order_of(config):
        if not shows and resume is None and ranks.is_main:
            unused_run_dir(cfg, "hydra.run.dir")
        experiment = planned(experiment, asked.overrides, composed)
        if resume is not None and (Path(cfg.hydra.runtime.output_dir) / JOB).exists():
            experiment = experiment.of_a_sweep()
        previous = previous_run([experiment], Path(cfg.hydra.runtime.output_dir).parent)
        needs.find(experiment)
        if ranks.several:
            refuse_needs(missing=needs.missing)
        known = needs.known(previous).of(experiment)
        try:
            prepared = tasks.prepare(known, trust=trust)
        except SpecError as error:
            if shows:
                wait_is_over()
                tasks.show_without_data(known, error, trust)
            raise
    wait_is_over()
    if not ranks.is_main:
        return follow(prepared, ranks)
    needs.prepare(shows=shows)
    if shows:
        tasks.show(prepared)
        return DONE
    where, run_dir = "hydra.run.dir" if resume is None else "resume", Path(cfg.hydra.runtime.output_dir)
    with claimed(run_dir, where, go_on=resume is not None):
        if resume is not None and _is_done(run_dir):  # another process has just finished it
            ranks.gathered([None, None])
            return DONE
        if experiment.settings.needs:
            is_new = needs.missing
            needs.make()
            if is_new:  # again, now that the runs exist from which its values come
                prepared = tasks.prepare(needs.known(previous).of(experiment), trust=trust)
        with explained(asked):
            returned = asked.app.run_checked(cfg, SingleRun(prepared, resume=resume, ranks=ranks))
    return int(returned.return_value)

"""Execute a command line that asks for a plan, a run or a sweep."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from hookrun import tasks
from hookrun.cli.check import Composition
from hookrun.cli.compose import claimed, over_shown_task, plain_run, planned, unused_run_dir
from hookrun.cli.errors import WrongOverrides, explained
from hookrun.cli.exit_codes import DONE
from hookrun.cli.gc_control import import_torch
from hookrun.cli.hydra import conf_dir
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


def one_run() -> SpecError:
    """The error for `fail_fast` with a single run."""
    return SpecError([Problem("fail_fast", "is for a sweep, and this is one run", "put -m first")])


def run(asked: Composition, trust: frozenset[str], typed: RunMode | None, of_sweep: SweepMode) -> int:
    """Compose and check, then show, run or sweep."""
    asked = replace(asked, overrides=over_shown_task(asked.overrides))
    asked, cfg = _composed(asked, trust, typed)
    app, mode = asked.app, asked.mode
    if mode is RunMode.RUN:
        if of_sweep.fail_fast:
            raise one_run()
        return _run_once(asked, cfg, trust)
    from hookrun.cli.sweep import sweep

    waiting_for("checking the jobs of the sweep")
    with sweep_lines(cfg):
        return sweep(app, cfg, trust, **vars(of_sweep))


def _composed(
    asked: Composition, trust: frozenset[str], typed: RunMode | None
) -> tuple[Composition, DictConfig]:
    """The configuration, and the composition that gave it, with its mode. Most often one composition is enough."""
    app, name = asked.app, asked.config_name
    if (found := app.composed(name, asked.overrides, typed)) is not None:
        cfg, mode, overrides = found
        return Composition(app, name, overrides, mode), cfg
    configured = app.configured_mode(name, asked.overrides)
    mode = typed or configured or RunMode.RUN
    overrides = asked.overrides if mode == configured else [*asked.overrides, f"hydra.mode={mode.name}"]
    asked = Composition(app, name, overrides, mode)
    try:
        with explained(asked):
            return asked, app.compose_config(name, overrides, mode)
    except WrongOverrides as error:
        if mode is RunMode.RUN and not _is_all(asked):
            _refuse_with_the_rest(asked, error, trust)
        raise


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
        return _run_once(again, cfg, trust, resume, folders=asked)


def _is_done(folder: Path) -> bool:
    is_done = state_of_run(folder) == DONE_STATE
    if is_done and is_main():
        print(f"{folder} is done: there is nothing to resume")
    return is_done


def _refuse_with_the_rest(asked: Composition, error: WrongOverrides, trust: frozenset[str]) -> None:
    """Raise `error` together with the problems of what the correct overrides compose; return if they do not compose."""
    try:
        with explained():
            cfg = asked.app.compose_config(asked.config_name, error.right, asked.mode)
        config = plain_run(cfg)
    except SpecError:  # the correct overrides do not compose by themselves
        return
    import_torch()
    waiting_for("looking for other mistakes")
    with origins_told(cfg):
        raise tasks.refusal(config, known=error.errors, trust=trust)


def _is_all(asked: Composition) -> bool:
    """Whether at most one value was typed and only hookrun's own files are read: no other mistake is possible then."""
    typed = [text for text in asked.overrides if not text.startswith("hydra.mode=")]
    return len(typed) < 2 and "{" not in "".join(typed) and asked.app.folders() == [conf_dir()]


def _run_once(
    asked: Composition,
    cfg: DictConfig,
    trust: frozenset[str],
    resume: Resume | None = None,
    folders: Composition | None = None,
) -> int:
    """Check one run, then show it or run it; returns the exit code.

    folders: what was typed, which names the folders where needs are found; None: `asked`. A stored configuration has
             no other experiments beside it.
    """
    config = plain_run(cfg)
    with origins_told(cfg):
        try:
            experiment = tasks.parse_experiment(config)
        except SpecError as error:
            if _is_all(asked):
                raise
            import_torch()
            waiting_for("looking for other mistakes")
            raise tasks.refusal(config, trust=trust) from error
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

"""Execute a command line that asks for a plan, a run or a sweep, or resumes a run; in one process or several."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from hookrun.command.cli.restarts import begun_before, tell_begun
from hookrun.command.compose.compose import claimed, parsed_run, place_run, plain_run, refuse_used
from hookrun.command.compose.errors import composed, explained, origins_told
from hookrun.command.compose.given import require_given, require_same
from hookrun.command.compose.hydra import Composition, conf_dir, opened
from hookrun.command.compose.loader import Loader
from hookrun.command.compose.overrides import LATEST, RESUME, Resume, named_folder
from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.exit_codes import DONE, exit_code
from hookrun.command.sweeps.jobs import JobFailed, import_torch, make_missing_page, run_alone
from hookrun.command.sweeps.needs import NeededRuns
from hookrun.engine.keys import HOOKS_FROM, key_of
from hookrun.errors import HookrunError, SpecError, first_lines, nearest, spec_error
from hookrun.run import tasks
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.given import NOTHING, Given
from hookrun.run.ranks import ALONE, Ranks, is_main, started
from hookrun.run.tasks import Ready, refuse_ranks, task_of
from hookrun.store.config.stored import read_yaml
from hookrun.store.format import CHECKPOINTS, CONFIG, JOB, STATUS, differences, encode
from hookrun.store.records import Status, read_record
from hookrun.store.run_dir import outputs_folder
from hookrun.terminal import noted, wait_is_over, waiting_for

_HYDRAS = ("hydra/job_logging=none", "hydra/hydra_logging=none")
_FREE = ("tags", "note", "objective", "needs", "train.checkpoint", "compute.strategy", "compute.timeout")
"""Keys that may differ when a run is resumed."""

_TELLING = 60.0
"""Seconds that a rank that cannot begin waits for the others, to tell them why."""


@dataclass(frozen=True)
class RunCommand:
    """One run that was typed, to be shown or to be run.

    composition: what was typed
    cfg:         the configuration that it gave
    experiment:  what `cfg` describes
    trust:       the packages that a user's own code may come from
    is_plan:     whether ``task=plan`` was typed
    resume:      what was typed to resume the run; None for a new run
    outcome:     is filled with what was done
    """

    composition: Composition
    cfg: DictConfig
    experiment: Experiment
    trust: frozenset[str]
    is_plan: bool = False
    resume: Resume | None = None
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def shows(self) -> bool:
        """Whether it only prints."""
        return self.is_plan or task_of(self.experiment).shows

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return Path(self.cfg.hydra.runtime.output_dir)


def resumed(
    command: Composition, trust: frozenset[str], resume: Resume, outcome: Outcome, given: Given
) -> int:
    """Resume an unfinished run; returns the exit code."""
    folder = named_folder(resume.name, outputs_folder())
    if _is_done(folder):
        outcome.run_dir = folder
        if is_main():
            if command.overrides:
                print(f"not used: {' '.join(command.overrides)}; start a new run for it")
            remove_left_states(folder)
            make_missing_page(folder)
        return DONE
    showing = [f"task={name}" for name, task in tasks.tasks().items() if task.shows]
    for typed in command.overrides:
        if typed in showing:
            what = f"{typed} does not make a run that could be resumed"
            raise spec_error("resume", what, "leave one of them out")
    return run_again(command, folder, trust, resume, outcome, given)


def run_again(
    command: Composition,
    folder: Path,
    trust: frozenset[str],
    resume: Resume,
    outcome: Outcome,
    given: Given = NOTHING,
) -> int:
    """Go on with the unfinished run in the folder; returns the exit code."""
    with composed_again(command, folder, force=resume.force) as (again, cfg):
        require_given(cfg, given, folder)
        if not resume.force:
            require_same(cfg, given, folder)
        experiment = parsed_run(cfg)
        if (folder / JOB).exists():
            experiment = experiment.of_a_sweep()
        # a stored configuration has no other experiments beside it: the folders that were typed have the needs
        needs = NeededRuns(command, trust, resumes=True)
        return run_once(RunCommand(again, cfg, experiment, trust, resume=resume, outcome=outcome), needs)


def run_once(command: RunCommand, needs: NeededRuns | None = None) -> int:
    """Check one run, then show it or run it; returns the exit code.

    needs: the runs that it needs; None: those of the typed config folders
    """
    experiment = command.experiment
    shows = command.shows
    if shows:
        shown = tasks.tasks()["plan"] if command.is_plan else type(task_of(experiment))
        command.outcome.refuse_showing(shown)
    if experiment.settings.baseline and not shows and is_main():
        print(noted("baseline: true is for sweeps (-m), which then run without hooks too; this is one run"))
    if not is_main():
        if shows:  # rank 0 shows it
            return DONE
    elif not shows and command.resume is None and (begun := begun_before(command.run_dir)):
        print(f"torchrun has started the run again: it goes on in {begun}")
        return run_again(command.composition, begun, command.trust, Resume(str(begun)), command.outcome)
    needs = needs or NeededRuns(command.composition, command.trust)
    try:
        with nullcontext(ALONE) if shows else ranks_of(experiment) as ranks:
            prepared = _checked(command, needs, ranks)
            if not ranks.is_main:
                return follow(prepared, ranks)
            needs.prepare(shows=shows)
            if shows:
                tasks.show(prepared)
                command.outcome.show((), prepared)
                return DONE
            return _performed(command, needs, ranks, prepared)
    except RefusedByMain as refused:
        return refused.exit_code


def _checked(command: RunCommand, needs: NeededRuns, ranks: Ranks) -> Ready:
    """The run, built and checked; writes nothing. Every rank calls this function."""
    config = plain_run(command.cfg)
    import_torch()
    waiting_for("building the model and checking the hooks")
    with (
        agreed(ranks) if ranks.several else nullcontext(),
        origins_told(command.cfg),
        tasks.in_order_of(config),
    ):
        if not command.shows and command.resume is None and ranks.is_main:
            refuse_used(command.run_dir, "hydra.run.dir")
        needs.find_all([command.experiment], command.run_dir.parent)
        if ranks.several and needs.missing:
            raise spec_error(
                "needs",
                "runs that it needs are not there, and each of several processes would make them",
                "run the same command once without torchrun and compute.strategy",
            )
        experiment = needs.given_to(command.experiment)
        try:
            prepared = tasks.prepare(experiment, trust=command.trust)
        except SpecError as error:
            if command.shows:
                wait_is_over()
                tasks.show_without_data(experiment, error, command.trust)
            raise
        if ranks.several and ranks.is_main:
            from hookrun.run.passes.agreement import read_splits

            read_splits(prepared)  # first on one rank, which may download the data for the others
    if ranks.several:
        from hookrun.run.passes.agreement import facts_of_rank

        with agreed(ranks) as facts:
            facts |= facts_of_rank(prepared, command.run_dir)
    wait_is_over()
    return prepared


def _performed(command: RunCommand, needs: NeededRuns, ranks: Ranks, prepared: Ready) -> int:
    """Make the run in its directory, after those that it needs; returns the exit code. Only rank 0 calls it."""
    resume = command.resume
    run_dir = command.run_dir
    command.outcome.run_dir = run_dir
    command.outcome.stopped = task_of(command.experiment).stopped
    with claimed(run_dir, "hydra.run.dir" if resume is None else RESUME, is_resumed=resume is not None):
        if resume is not None and _is_done(run_dir):  # another process has just finished it
            ranks.gathered([None, None])
            return DONE
        tell_begun(run_dir)
        had_missing = needs.missing
        needs.make()
        if had_missing:  # again, now that the runs exist from which its values come
            prepared = tasks.prepare(needs.given_to(command.experiment), trust=command.trust)
        run = partial(run_alone, prepared=prepared, resume=resume, ranks=ranks, outcome=command.outcome)
        with explained(command.composition):
            returned = command.composition.app.run_checked(command.cfg, run)
    return int(returned.return_value)


def _is_done(folder: Path) -> bool:
    """Whether status.json says so. Raises SpecError for a directory without a run that can be resumed."""
    if not folder.is_dir():
        names = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        names += get_close_matches(folder.name, [LATEST])  # a word of the command, not a directory
        raise spec_error(RESUME, f"there is no directory {folder}", nearest(folder.name, names))
    if not (folder / STATUS).exists():
        raise spec_error(
            RESUME,
            f"{folder} has no {STATUS}: no run began there",
            "name the directory of a run, or of a sweep",
        )
    if not (folder / CONFIG).exists():
        raise spec_error(
            RESUME,
            f"{folder} has no {CONFIG}: it was recorded in a user's own loop, and only that loop can resume it",
        )
    is_done = bool(read_record(folder / STATUS, Status)["status"] == "done")
    if is_done and is_main():
        print(f"{folder} is done: there is nothing to resume")
    return is_done


def remove_left_states(folder: Path) -> None:
    """Remove the saved states of a finished run that was killed before it removed them itself."""
    keeps = read_yaml(folder / CONFIG, folder)
    for key in ("train", "checkpoint", "keep_done"):
        keeps = keeps.get(key) if isinstance(keeps, Mapping) else None
    if keeps is not True and any((folder / CHECKPOINTS).glob("state_*")):
        from hookrun.store.states.files import remove_states

        with claimed(folder, RESUME, is_resumed=True):
            remove_states(folder)


@contextmanager
def composed_again(
    command: Composition, folder: Path, *, force: bool
) -> Iterator[tuple[Composition, DictConfig]]:
    """The stored configuration with the typed overrides applied, to be run in the directory of the stored run.

    If an override names a group (``experiment=clip_fc``), the configuration is composed from the config folders, as
    the first time. Raises SpecError with each difference to the stored configuration, unless `force`.
    """
    typed = command.overrides
    groups = {HOOKS_FROM, *command.app.config_loader.list_groups("")}
    with opened(conf_dir(), folder / Path(CONFIG).parent) as app:
        stored = Composition(app, Path(CONFIG).stem, list(_HYDRAS))
        again = replace(stored, overrides=[*_HYDRAS, *typed])
        if any(key_of(text).partition("@")[0] in groups for text in typed):
            again = command
        loader = cast(Loader, app.config_loader)
        loader.adds_bundle = False  # the stored configuration has its hooks
        cfg = composed(again)
        # what is stored stays as it is, unless a typed override replaces it
        place_run(cfg, folder, stores=bool(typed) and force)
        if typed and not force:
            stored_cfg = composed(stored)
            place_run(stored_cfg, folder, stores=False)
            before = plain_run(stored_cfg)
            before.setdefault("hooked", True)  # a run of an earlier version does not store it
            lines: list[str] = []
            for key, old, new in differences(before, plain_run(cfg)):
                if key not in _FREE and not key.startswith(tuple(f"{free}." for free in _FREE)):
                    lines.append(f"{key}: {old!r:.100} there, {new!r:.100} now")
            if lines:
                what = "\n    ".join([f"{folder} is of another configuration:", *first_lines(lines)])
                raise spec_error(RESUME, what, "leave it out, or type resume_anyway=true")
        yield again, cfg


@contextmanager
def ranks_of(experiment: Experiment) -> Iterator[Ranks]:
    """The processes of the run; the process group is joined on entry and left on exit.

    Raises SpecError where torchrun started several and the experiment does not say how to split a run over them.
    """
    compute = experiment.settings.compute
    if compute.strategy == "none":
        refuse_ranks()
    me = None if compute.strategy == "none" else started()
    if me is None:
        yield ALONE
        return
    task = task_of(experiment)
    if me.size > 1 and not task.splits_batches:
        raise spec_error(
            "task",
            f"found {me.size} processes, and task={task.name} is one for a single process",
            "start it without torchrun",
        )
    from hookrun.run.experiment.session import device_of
    from hookrun.run.ranks.group import joined

    device = device_of(compute).type
    with joined(me, device, compute.timeout) as ranks, ranks.failures_told():
        yield ranks
        if not ranks.failed:  # a rank that dies at its end costs no page
            ranks.meet()


def told_to_ranks(error: HookrunError) -> bool:
    """Tell why this rank ends to those on other nodes, which wait for it; False if they cannot be reached."""
    try:
        me = started()
        is_on_one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"  # its torchrun ends the others
        if error._is_told or me is None or me.size == 1 or is_on_one_node:
            return True
        import_torch()
        from hookrun.run.ranks.group import joined

        with joined(me, "cpu", _TELLING) as ranks, ranks.failures_told():
            ranks.gathered([str(error), error.exit_code])  # as `agreed` does
    except Exception:  # also one of these ends for the same reason, before this one has joined it
        return False
    return True


class RefusedByMain(JobFailed):
    """Rank 0 refused the experiment and reports why; this rank ends with the same exit code and prints nothing."""


@contextmanager
def agreed(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """A block that has to succeed on every one of several ranks, and to put the same facts into what it gets.

    An error on rank 0 is raised there, and RefusedByMain on the other ranks. If only another rank fails, rank 0 raises
    HookrunError with that rank's message; for facts that differ, SpecError with each of them.
    """
    facts: dict[str, Any] = {}
    failure: HookrunError | None = None
    try:
        yield facts
    except HookrunError as error:
        failure = error
    mine = encode(facts)
    outcome: Any = sha256(mine.encode()).hexdigest() if facts else None
    if failure is not None:
        outcome = [str(failure), failure.exit_code]
    outcomes = ranks.gathered(outcome)
    if failure is not None and ranks.is_main:
        raise failure
    for rank, each in enumerate(outcomes):
        if isinstance(each, list):
            text, code = each
            if not ranks.is_main:
                raise RefusedByMain("refused by rank 0", code)
            raise HookrunError(f"rank {rank} cannot run the experiment, and rank 0 can:\n{text}")
    if any(each != outcome for each in outcomes):
        from hookrun.run.passes.agreement import differing_ranks

        differing = differing_ranks([json.loads(each) for each in ranks.gathered(mine)])
        raise differing if ranks.is_main else RefusedByMain("refused by rank 0", differing.exit_code)


def follow(prepared: Ready, ranks: Ranks) -> int:
    """Do the work of a rank other than 0 in a run; returns its exit code."""
    from hookrun.run.execute import execute_as_rank

    try:
        return execute_as_rank(prepared, ranks)
    except Exception as error:
        what = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
        print(f"rank {ranks.rank}: {what}", file=sys.stderr, flush=True)
        return exit_code(error)

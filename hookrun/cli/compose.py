"""From the config folders and overrides to the plain mapping that hookrun validates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hookrun.cli.check import Composition, experiment_file, lost_keys
from hookrun.cli.config_copies import tell, tell_output_dir, users_part
from hookrun.cli.errors import explained
from hookrun.cli.flags import existing_folder
from hookrun.cli.hydra import conf_dir, opened
from hookrun.errors import Problem, SpecError
from hookrun.interpolations import resolved
from hookrun.spec import Experiment
from hookrun.store.files import StoreError
from hookrun.store.format import STATUS
from hookrun.store.lock import LockedError, sole_writer
from hookrun.tasks import parse_experiment, task_of, tasks


def compose_dict(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, config_name: str = "config"
) -> dict[str, Any]:
    """The configuration that ``hookrun --config-dir config_dir OVERRIDES`` would run, as a plain mapping.

    Writes nothing to disk. Raises SpecError.
    """
    extra = [] if config_dir is None else [existing_folder("config_dir", config_dir)]
    with opened(conf_dir(), *extra) as app:
        with explained(Composition(app, config_name, list(overrides))):
            cfg = app.compose_config(config_name, list(overrides), RunMode.RUN)
        return plain_run(cfg)


def plain_run(cfg: DictConfig) -> dict[str, Any]:
    """The user's part of the configuration of a single run, resolved."""
    return _placed(cfg, "hydra.run.dir")


def plain_job(cfg: DictConfig) -> dict[str, Any]:
    """The user's part of the configuration of one job of a sweep, resolved."""
    return _placed(cfg, "hydra.sweep.dir", "hydra.sweep.subdir")


def _placed(cfg: DictConfig, *directory: str) -> dict[str, Any]:
    with explained():
        # Hydra does this before it calls a job: a configuration may refer to ${hydra:runtime.output_dir}.
        tell(cfg)
        output_dir = os.path.abspath(os.path.join(*(str(OmegaConf.select(cfg, key)) for key in directory)))
        tell_output_dir(cfg, output_dir)
        # Other keys that decide what Hydra writes.
        for key in ("output_subdir", "job.name", "job_logging", "hydra_logging"):
            written = OmegaConf.select(cfg.hydra, key)
            if OmegaConf.is_config(written):
                OmegaConf.to_container(written, resolve=True)
        users = users_part(cfg)
    _refuse_lost_keys(cfg, users)
    return plain(users)


def unused_run_dir(cfg: DictConfig, where: str) -> Path:
    """The directory of a run or job whose configuration has been resolved.

    Raises SpecError if it holds a run already: Hydra would overwrite the `.hydra` of that run.
    """
    run_dir = Path(cfg.hydra.runtime.output_dir)
    _refuse_run_in(run_dir, where)
    return run_dir


def _refuse_run_in(run_dir: Path, where: str) -> None:
    if (run_dir / STATUS).exists():
        raise SpecError([Problem(where, f"{run_dir} already holds a run", "give another directory")])


@contextmanager
def claimed(run_dir: Path, where: str, *, go_on: bool = False) -> Iterator[None]:
    """Lock the directory of a run or sweep during the block.

    where: the key that set the directory
    go_on: it holds a run that is being resumed

    Raises SpecError, with nothing changed, if another process is writing there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(sole_writer(run_dir))
        except LockedError as error:
            raise SpecError([Problem(where, str(error), "give another directory, or wait")]) from error
        except StoreError as error:
            raise SpecError([Problem(where, str(error), "give another directory")]) from error
        if not go_on:
            _refuse_run_in(run_dir, where)  # another process may have finished a run there just now
        yield


def plain(users: DictConfig) -> dict[str, Any]:
    """The user's part of a configuration, resolved; raises SpecError."""
    with explained():
        return cast(dict[str, Any], resolved(users))


def _refuse_lost_keys(cfg: DictConfig, users: DictConfig) -> None:
    """Refuse an experiment file that would not run what the user asked for."""
    if problems := lost_keys(cfg):
        raise SpecError(problems)
    choices = cfg.hydra.runtime.choices
    overrides = cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.task))  # unresolved, as typed
    typed = [text for text in overrides if text.startswith("task=")]
    task = OmegaConf.select(users, "task.name")
    if typed and choices.get("experiment") is not None and choices.get("task") != task:
        what = f"it sets task.name to {task!r} itself, so that {typed[-1]} would do nothing"
        hint = f"let its defaults list say `- override /task: {task}` instead"
        raise SpecError([Problem(experiment_file(cfg), what, hint)])


def planned(
    experiment: Experiment, overrides: Sequence[str], compose: Callable[[list[str]], dict[str, Any]]
) -> Experiment:
    """The experiment without `task=plan`, so that hooks are compiled for its own task; others are unchanged.

    compose: overrides -> the configuration
    """
    task = task_of(experiment)
    if not task.takes_place:
        return experiment
    typed = {f"task={task.name}", f"task.name={task.name}"}
    own = parse_experiment(compose([text for text in overrides if text.lstrip("+") not in typed]))
    return own if task_of(own).has_plan else experiment


def over_shown_task(overrides: Sequence[str]) -> list[str]:
    """The overrides, changed so that keys of the experiment's own task are accepted together with ``task=plan``."""
    shown = {f"task={name}" for name, task in tasks().items() if task.takes_place}
    if shown.isdisjoint(overrides):
        return list(overrides)
    return [f"++{text}" if text.startswith("task.") else text for text in overrides]

"""Compose config folders and overrides into the plain mapping that hookrun validates."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.errors import (
    composed,
    experiment_file,
    explained,
    lost_keys,
    nothing_overwritten,
    origins_told,
)
from hookrun.command.compose.hydra import Composition, conf_dir, existing_folder, opened
from hookrun.errors import Problem, SpecError, refuse, refused_at, shortened, spec_error, whole_characters
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.tasks import parse_experiment, task_of
from hookrun.store.config.interpolations import literal, resolved
from hookrun.store.files import StoreError, os_reason
from hookrun.store.format import STATUS
from hookrun.store.lock import LockedError, sole_writer
from hookrun.store.run_dir import run_above


def compose_dict(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
    """The configuration that ``hookrun --config-dir config_dir OVERRIDES`` would run, as a plain mapping.

    Writes nothing to disk. Raises SpecError.
    """
    extra = [] if config_dir is None else [existing_folder("config_dir", config_dir)]
    with opened(conf_dir(), *extra) as app:
        return plain_run(composed(Composition(app, "config", list(overrides))))


def place_run(cfg: DictConfig, run_dir: Path, *, stores: bool = True) -> None:
    """Make `cfg` a single run in that directory.

    stores: whether Hydra stores the configuration there
    """
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.run.dir = literal(str(run_dir))
        cfg.hydra.mode = RunMode.RUN
        if not stores:
            cfg.hydra.output_subdir = None


def parsed_run(cfg: DictConfig, *, is_plan: bool = False) -> Experiment:
    """The experiment of a single run. Raises SpecError with every mistake in its configuration.

    is_plan: see `parsed`
    """
    with origins_told(cfg):
        return parsed(cfg, plain_run(cfg), is_plan=is_plan)


def parsed(cfg: DictConfig, config: dict[str, Any], *, is_plan: bool) -> Experiment:
    """The experiment of `config`, the user's part of `cfg`.

    is_plan: whether ``task=plan`` was typed: the experiment keeps its own task, for which its hooks are compiled, or
             gets a training where that task runs without hooks
    """
    if is_plan:
        _refuse_own_task(cfg, config, "task=plan")
    with nothing_overwritten(cfg):
        experiment = parse_experiment(config)
    if is_plan and not task_of(experiment).has_plan:
        return parse_experiment(config | {"task": {"name": "plan"}})
    return experiment


def plain_run(cfg: DictConfig, *directory: str) -> dict[str, Any]:
    """The user's part of the configuration of a single run or of one job of a sweep, resolved.

    directory: the keys of the parts of its directory, by default those of a run; `JOB_DIRECTORY` are those of a job
    """
    with explained():
        # Hydra sets these before it calls a job: a configuration may refer to ${hydra:runtime.output_dir}.
        OmegaConf.set_readonly(cfg.hydra, True)
        HydraConfig.instance().cfg = cast(Any, cfg)  # unlike `HydraConfig.set_config`, without a copy
        parts = (str(OmegaConf.select(cfg, key)) for key in directory or ("hydra.run.dir",))
        with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
            cfg.hydra.runtime.output_dir = literal(os.path.abspath(os.path.join(*parts)))
        # what Hydra itself resolves
        for key in ("output_subdir", "job.name", "job_logging", "hydra_logging"):
            written = OmegaConf.select(cfg.hydra, key)
            if OmegaConf.is_config(written):
                OmegaConf.to_container(written, resolve=True)
        users = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    refuse(lost_keys(cfg))
    config = plain(users)
    overrides = cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.task))  # unresolved, as typed
    for typed in overrides:
        if typed.startswith("task="):
            _refuse_own_task(cfg, config, typed)
    return config


JOB_DIRECTORY = ("hydra.sweep.dir", "hydra.sweep.subdir")


_MOST_NAME = 255
"""Bytes of the name of a file; a path is longer."""


def refuse_used(run_dir: Path, where: str) -> None:
    """Raise SpecError if the directory, or one above it, holds a run already, and if there can be none of that name.

    Hydra would overwrite the `.hydra` of that run, and the files of a run inside it are none of its own.
    """
    hint = "give another directory"
    with refused_at(where, hint, kinds=OSError, what=f"{shortened(str(run_dir), 300)}: ", tell=os_reason):
        if max(len(os.fsencode(name)) for name in run_dir.parts) > _MOST_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if (run_dir / STATUS).exists():
            raise spec_error(where, f"{run_dir} already holds a run", hint)
    if (above := run_above(run_dir)) is not None:
        what = f"{run_dir} is inside of {above}, which holds a run"
        raise spec_error(where, what, f"start in another folder, or {hint}")


@contextmanager
def claimed(run_dir: Path, where: str, *, is_resumed: bool = False) -> Iterator[None]:
    """Lock the directory of a run or sweep, so that no other process writes into it during the block.

    where: the key that chose the directory, for errors
    is_resumed: whether the directory holds a run that is resumed

    Raises SpecError where another process is writing there, which is not affected, and for a directory whose path Hydra
    would resolve again and take for another one.
    """
    hint = "start in another folder, or give another directory"
    for folder in (str(run_dir), os.getcwd()):
        if whole_characters(folder) != folder:
            raise spec_error(where, f"{folder} has characters that are not UTF-8 in its name", hint)
    if "${" in str(run_dir):
        what = f"{run_dir} has `${{`, an interpolation in a configuration, in its name"
        raise spec_error(where, what, hint)
    with ExitStack() as stack:
        with (
            refused_at(where, "give another directory", kinds=StoreError),
            refused_at(where, "give another directory, or wait", kinds=LockedError),
        ):
            stack.enter_context(sole_writer(run_dir))
        if not is_resumed:
            refuse_used(run_dir, where)  # another process may have finished there just now
        yield


def plain(users: DictConfig) -> dict[str, Any]:
    """The user's part of a configuration, resolved; raises SpecError."""
    with explained():
        return cast(dict[str, Any], resolved(users))


def _refuse_own_task(cfg: DictConfig, config: dict[str, Any], typed: str) -> None:
    """Raise SpecError for an experiment file that sets its task itself, so that the typed ``task=`` has no effect."""
    choices = cfg.hydra.runtime.choices
    section = config.get("task")
    key = "task" if isinstance(section, str) else "task.name"
    task = section.get("name") if isinstance(section, dict) else section
    if choices.get("experiment") is not None and choices.get("task") != task:
        what = f"it sets {key} to {task!r} itself, so that {typed} would do nothing"
        hint = f"let its defaults list say `- override /task: {task}` instead"
        raise SpecError([Problem(experiment_file(cfg), what, hint, found=task, place=key)])

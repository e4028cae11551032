"""What is given from Python, in a composed configuration: placed there, or compared with what a stored one says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.hydra import BASIC_LAUNCHER
from hookrun.command.compose.overrides import RESUME
from hookrun.data.info import ALL, Split
from hookrun.engine.keys import GIVEN, key_of, root_of
from hookrun.errors import Problem, first_lines, refuse, spec_error
from hookrun.run.experiment.given import Given
from hookrun.run.experiment.model_task import ModelTask
from hookrun.run.tasks import Task, tasks
from hookrun.store.format import CHECKPOINTS, differences

SECTIONS = ("model", "data")
_KEPT = ("data.batch_size", "data.collate", "data.workers", "model.weights")
"""Keys that may be typed beside data or a model that is given."""


def place_given(cfg: DictConfig, given: Given) -> None:
    """Replace the sections of the configuration in whose place something is given.

    Raises SpecError for typed overrides of these sections, and for what cannot go with it.
    """
    typed = [str(text) for text in cfg.hydra.overrides.task]
    refuse(
        Problem(
            text,
            f"and {root_of(text)} is given from Python, in place of {root_of(text)}.*",
            "leave one of them out",
        )
        for text in typed
        if root_of(text) in given.names and key_of(text) not in _KEPT
    )
    task = _task(cfg)[0]
    if task is not None and not (task.shows or issubclass(task, ModelTask)):
        raise spec_error(
            "task", f"task={task.task_name} runs no model on data", f"leave out {' and '.join(given.names)}"
        )
    if given.model is not None and OmegaConf.select(cfg, "model.weights") is not None:
        hint = "load them into the module, and set model.weights=null"
        raise spec_error("model.weights", "the module that is given has its weights", hint)
    if OmegaConf.select(cfg, "compute.strategy", default="none") != "none":
        what = "what is given from Python is in this process alone"
        raise spec_error(
            "compute.strategy", what, "name model and data in the configuration, or set it to none"
        )
    split = _split(cfg)
    if cfg.hydra.mode is RunMode.MULTIRUN and cfg.hydra.launcher.get("_target_") != BASIC_LAUNCHER:
        what = "what is given from Python is in this process alone, and this launcher starts others"
        raise spec_error("hydra.launcher", what, "leave it out: jobs then run one after the other")
    with read_write(cfg), open_dict(cfg):
        for name, record in given.record(split).items():
            kept = {key: value for key, value in _plain(cfg.get(name)).items() if f"{name}.{key}" in _KEPT}
            cfg[name] = {**kept, "name": GIVEN, "args": record}
        if given.data is not None:
            from hookrun.data.given import parts_of, settings_of

            cfg.data.update(settings_of(parts_of(given.data, split)))
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        for name in given.names:
            cfg.hydra.runtime.choices[name] = GIVEN


def _task(cfg: DictConfig) -> tuple[type[Task] | None, Any]:
    """The class of the task, if there is one, and its `split`."""
    section: Any = _plain(cfg.get("task"))
    name = section.get("name", "train") if isinstance(section, Mapping) else section
    return tasks().get(name), section.get("split") if isinstance(section, Mapping) else None


def _split(cfg: DictConfig) -> Split:
    """The split of data that does not say it: train for a task that trains, else the task's, by default val."""
    task, split = _task(cfg)
    return "train" if split in ("train", ALL) or (task is not None and task.trains) else "val"


def _plain(section: Any) -> Any:
    return OmegaConf.to_container(section, resolve=False) if OmegaConf.is_config(section) else section


def require_given(config: Any, given: Given, folder: Path) -> None:
    """Raise SpecError unless the same sections are given as when the run or sweep in the folder began.

    config: its stored configuration
    """
    stored = [name for name in SECTIONS if _is_given(config, name)]
    lacking = [name for name in stored if name not in given.names]
    if lacking:
        arguments = ", ".join(f"{name}=…" for name in stored)
        hint = f"go on from Python: hookrun.run({arguments}, overrides=['resume={folder}'])"
        raise spec_error(RESUME, f"{folder} was given {' and '.join(lacking)} from Python", hint)
    for name in given.names:
        if name not in stored:
            raise spec_error(RESUME, f"{folder} names its own {name}", f"leave out {name}=…")


def require_same(cfg: DictConfig, given: Given, folder: Path) -> None:
    """Raise SpecError for each difference of what is given to what the run in the folder had.

    The weights of a training that has saved a state may differ: they are in the state.

    cfg: the stored configuration
    """
    now = given.record(_split(cfg))
    has_state = any((folder / CHECKPOINTS).glob("state_*"))
    task = _task(cfg)[0]
    is_in_state = has_state and task is not None and task.trains
    lines = list[str]()
    for name in given.names:
        for key, before, after in differences(_plain(cfg[name])["args"], now[name]):
            if key != "weights" or not is_in_state:
                lines.append(f"{name}.{key}: {before} then, {after} now")
    if lines:
        what = "\n    ".join([f"{folder} was given something else:", *first_lines(lines)])
        raise spec_error(RESUME, what, "give the same, or type resume_anyway=true")


def _is_given(config: Any, name: str) -> bool:
    section = config.get(name) if isinstance(config, Mapping) else None
    return isinstance(section, Mapping) and section.get("name") == GIVEN

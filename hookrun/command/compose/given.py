"""What is given from Python, in a composed configuration: placed there, or compared with what a stored one says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.command.compose.hydra import BASIC_LAUNCHER
from hookrun.command.compose.overrides import RESUME
from hookrun.data.info import ALL, Split
from hookrun.engine.keys import GIVEN, key_of, root_of
from hookrun.errors import Problem, first_lines, refuse, spec_error
from hookrun.run.experiment.given import SECTIONS, Given, Sections
from hookrun.run.experiment.model_task import ModelTask
from hookrun.run.tasks import Task, tasks
from hookrun.store.format import CHECKPOINTS, MULTIRUN, differences

_KEPT = ("data.batch_size", "data.collate", "data.workers")
"""Keys that hold beside data that is given, unless it is a loader, which has its own."""
_NO_WEIGHTS = "model.weights"
_ALONE = "what is given from Python is in this process alone"


def place_given(cfg: DictConfig, given: Given) -> None:
    """Replace the sections of the configuration in whose place something is given.

    Raises SpecError for typed overrides of these sections, and for what cannot go with it.
    """
    sections = given.sections(_split(cfg))
    refuse(_problems(cfg, sections))
    with read_write(cfg), open_dict(cfg), read_write(cfg.hydra), open_dict(cfg.hydra):
        for name, section in sections.items():
            kept = {key: value for key, value in cfg[name].items() if f"{name}.{key}" in _KEPT}
            cfg[name] = {"name": GIVEN, **kept, **section}
            cfg.hydra.runtime.choices[name] = GIVEN


def _problems(cfg: DictConfig, sections: Sections) -> Iterator[Problem]:
    """What does not go with the sections that are given."""
    for text in cfg.hydra.overrides.task:
        root = root_of(text)
        if root in sections and not _holds(key_of(text), sections[root]):
            what = f"and {root} is given from Python, in place of {root}.*"
            yield Problem(text, what, "leave one of them out")
    task = _task(cfg)
    if task is not None and not (task.shows or issubclass(task, ModelTask)):
        hint = f"leave out {' and '.join(sections)}"
        yield Problem("task", f"task={task.task_name} does not run a model on data", hint)
    if "model" in sections and OmegaConf.select(cfg, _NO_WEIGHTS) is not None:
        hint = f"load them into it, and set {_NO_WEIGHTS}=null"
        yield Problem(_NO_WEIGHTS, "the module that is given has its weights", hint)
    if OmegaConf.select(cfg, "compute.strategy") not in (None, "none"):
        yield Problem(
            "compute.strategy", _ALONE, "set it to none, or name model and data in the configuration"
        )
    is_sweep = cfg.hydra.mode is RunMode.MULTIRUN
    if is_sweep and cfg.hydra.launcher.get("_target_") != BASIC_LAUNCHER:
        yield Problem("hydra/launcher", f"{_ALONE}, and this launcher starts others", "leave it out")


def _holds(key: str, section: Mapping[str, Any]) -> bool:
    """Whether a typed key holds beside the section that is given."""
    return key == _NO_WEIGHTS or (key in _KEPT and key.rpartition(".")[2] not in section)


def _task(cfg: DictConfig) -> type[Task] | None:
    """The class of the task; None if there is none of its name, which is refused later."""
    section: Any = cfg.get("task")
    return tasks().get(section.get("name", "train") if isinstance(section, Mapping) else section)


def _split(cfg: DictConfig) -> Split:
    """The split of data that does not say it: train for a task that trains, else the task's, by default val."""
    task = _task(cfg)
    if task is not None and task.trains:
        return "train"
    section: Any = cfg.get("task")
    split = section.get("split") if isinstance(section, Mapping) else None
    return "train" if split in ("train", ALL) else "val"


def given_in(config: Any) -> list[str]:
    """The sections of a stored configuration in whose place something was given from Python."""
    names: list[str] = []
    for name in SECTIONS:
        section = config.get(name) if isinstance(config, Mapping) else None
        if isinstance(section, Mapping) and section.get("name") == GIVEN:
            names.append(name)
    return names


def resuming_call(names: list[str], folder: Path) -> str:
    """The call that goes on with the run or sweep in the folder, to which these sections were given."""
    function = "sweep" if (folder / MULTIRUN).is_file() else "run"
    arguments = ", ".join(f"{name}=…" for name in names)
    return f"hookrun.{function}({arguments}, overrides=[{f'{RESUME}={folder}'!r}])"


def require_given(config: Any, given: Given, folder: Path) -> None:
    """Raise SpecError unless the same sections are given as when the run or sweep in the folder began.

    config: its stored configuration
    """
    stored = given_in(config)
    lacking = [name for name in stored if name not in given.names]
    if lacking:
        what = f"{folder} was given {' and '.join(lacking)} from Python"
        raise spec_error(RESUME, what, f"go on from Python: {resuming_call(stored, folder)}")
    for name in given.names:
        if name not in stored:
            raise spec_error(RESUME, f"the configuration of {folder} names its {name}", f"leave out {name}=…")


def require_same(cfg: DictConfig, given: Given, folder: Path) -> None:
    """Raise SpecError with each difference of what is given to what the run in the folder had.

    The weights of a training that has saved a state may differ: they are read from the state.

    cfg: the stored configuration
    """
    task = _task(cfg)
    is_in_state = task is not None and task.trains and any((folder / CHECKPOINTS).glob("state_*"))
    lines: list[str] = []
    for name, section in given.sections(_split(cfg)).items():
        for key, before, now in differences(cfg[name].args, section["args"]):
            if key != "weights" or not is_in_state:
                lines.append(f"{name}.{key}: {before} then, {now} now")
    if lines:
        what = "\n    ".join([f"{folder} was given something else:", *first_lines(lines)])
        raise spec_error(RESUME, what, "give the same, or type resume_anyway=true")

"""`resume=DIR`: continues an unfinished run in its own directory, with its stored configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from hookrun.cli.check import Composition
from hookrun.cli.compose import claimed, plain_run
from hookrun.cli.errors import explained
from hookrun.cli.hydra import conf_dir, opened
from hookrun.cli.typed import LATEST, RESUME
from hookrun.errors import Problem, SpecError, nearest
from hookrun.store.format import CHECKPOINTS, CONFIG, STATUS, differences
from hookrun.store.outputs import outputs_folder
from hookrun.store.records import Status, read_record
from hookrun.store.stored_config import read_yaml

_HYDRAS = ("hydra/job_logging=none", "hydra/hydra_logging=none")
_FREE = ("tags", "objective", "needs", "train.checkpoint", "compute.strategy", "compute.timeout")
"""Keys that may differ when a run is resumed."""
_MOST_SHOWN = 20


def run_folder(name: str) -> Path:
    """The directory that `resume` names. Raises SpecError for `latest` if there is no latest run."""
    if name != LATEST:
        return Path(os.path.realpath(os.path.expanduser(name)))
    link = outputs_folder() / LATEST
    if not link.exists():
        what = f"there is no {link}"
        raise SpecError([Problem(RESUME, what, "name the directory of the run: resume=outputs/…")])
    return Path(os.path.realpath(link))


def state_of_run(folder: Path) -> str:
    """The status in the run's status.json. Raises SpecError for a directory without a run that can be resumed."""
    if not folder.is_dir():
        there = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise SpecError([Problem(RESUME, f"there is no directory {folder}", nearest(folder.name, there))])
    if not (folder / STATUS).exists():
        what = f"{folder} has no {STATUS}: no run began there"
        raise SpecError([Problem(RESUME, what, "name the directory of a run, or of a sweep")])
    if not (folder / CONFIG).exists():
        what = f"{folder} has no {CONFIG}: it was recorded in a user's own loop, and only that loop can resume it"
        raise SpecError([Problem(RESUME, what)])
    found: str = read_record(folder / STATUS, Status)["status"]
    return found


def remove_left_states(folder: Path) -> None:
    """Remove the saved states of a finished run that was killed before it removed them itself."""
    keeps = read_yaml(folder / CONFIG, folder)
    for key in ("train", "checkpoint", "keep_done"):
        keeps = keeps.get(key) if isinstance(keeps, Mapping) else None
    if keeps is not True and any((folder / CHECKPOINTS).glob("state_*")):
        from hookrun.store.states import remove_states

        with claimed(folder, RESUME, go_on=True):
            remove_states(folder)


@contextmanager
def composed_again(
    asked: Composition, folder: Path, *, anyway: bool
) -> Iterator[tuple[Composition, DictConfig]]:
    """The stored configuration with the typed overrides applied, to be run in the directory of the stored run.

    If an override names a group (``experiment=clip_fc``), the configuration is composed from the config folders, as
    the first time. Raises SpecError with each difference to the stored configuration, unless `anyway`.
    """
    with opened(conf_dir(), folder / Path(CONFIG).parent) as app:
        stored = Composition(app, Path(CONFIG).stem, list(_HYDRAS))
        groups = set(asked.app.config_loader.list_groups(""))
        from_folders = any(_key(text) in groups for text in asked.overrides)
        again = asked if from_folders else replace(stored, overrides=[*_HYDRAS, *asked.overrides])
        cfg = _composed(again, folder, stores=bool(asked.overrides) and anyway)
        if asked.overrides and not anyway:
            before, now = plain_run(_composed(stored, folder)), plain_run(cfg)
            before.setdefault("hooked", True)  # a run of an earlier version does not store it
            if lines := list(_differences(before, now)):
                more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
                what = "\n".join(f"\n    {line}" for line in [*lines[:_MOST_SHOWN], *more])
                hint = "leave it out, or type resume_anyway=true"
                raise SpecError([Problem(RESUME, f"{folder} is of another configuration:{what}", hint)])
        yield again, cfg


def _composed(asked: Composition, folder: Path, *, stores: bool = False) -> DictConfig:
    """The configuration, to be run in the folder; stores: whether it replaces the configuration stored there."""
    with explained(asked):
        cfg = asked.app.compose_config(asked.config_name, asked.overrides, RunMode.RUN)
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.run.dir = str(folder).replace("${", "\\${")
        cfg.hydra.mode = RunMode.RUN
        if not stores:
            cfg.hydra.output_subdir = None  # what is stored stays as it is
    return cfg


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~").partition("@")[0]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, old, new in differences(before, now):
        if not any(key == free or key.startswith(f"{free}.") for free in _FREE):
            yield f"{key}: {old!r:.100} there, {new!r:.100} now"

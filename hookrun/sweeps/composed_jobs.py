"""The jobs of a sweep, each composed once, before the first of them runs."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.compose.compose import plain, users_part
from hookrun.compose.errors import explained
from hookrun.compose.hydra import App, Composition, numbered
from hookrun.config import root_of
from hookrun.config.interpolations import literal
from hookrun.errors import SpecError
from hookrun.report.sweep_facts import is_about_hooks

HOOKED = "hooked"
SUBDIR = "hydra.sweep.subdir"


MOST_KEPT = 1_000
"""The most configurations that a sweep keeps in memory; the jobs after these are composed again when they run."""


@dataclass(frozen=True)
class ComposedJob:
    """One job of a sweep.

    app, sweep:     what composes it: the configuration of the sweep
    cfg:            its configuration with Hydra's section; None if it is not kept
    config:         the hash that identifies it when the sweep is resumed; "" if it has an error, or was not composed
    is_hooked:      whether its hooks are installed; false for `hooked: false`
    wants_baseline: whether it has hooks and is to be compared with the same job without them
    has_number:     whether the user's part of the configuration refers to the number of the job
    error:          why it does not compose or resolve, else None
    """

    app: App
    sweep: DictConfig
    overrides: Sequence[str]
    cfg: DictConfig | None = None
    config: str = ""
    is_hooked: bool = True
    wants_baseline: bool = False
    has_number: bool = False
    error: SpecError | None = None

    def configuration(self, number: int, name: str | None = None) -> DictConfig:
        """The configuration with which the job runs.

        number: its `hydra.job.num`
        name:   its directory, relative to the sweep's; None: the one that `hydra.sweep.subdir` gives
        """
        if self.cfg is None:
            cfg = self.app.job_config(self.sweep, self.overrides, number)
        else:
            cfg = numbered(copy.deepcopy(self.cfg), number)
        if name is not None:
            with read_write(cfg.hydra), open_dict(cfg.hydra):
                cfg.hydra.sweep.subdir = literal(name)
                cfg.hydra.overrides.hydra.append(subdir_override(name))
        return cfg


def subdir_override(name: str) -> str:
    """The override that sets the directory of a job, relative to the sweep's."""
    return f"{SUBDIR}={QuotedString(literal(name), Quote.single).with_quotes()}"


def command_of(app: App, cfg: DictConfig, overrides: Sequence[str]) -> Composition:
    """The composition of a job of the sweep `cfg`, or with no overrides that of the sweep itself."""
    shared: Any = OmegaConf.to_container(cfg.hydra.overrides.hydra)
    return Composition(app, cfg.hydra.job.config_name, [*shared, *overrides])


def composed_job(app: App, cfg: DictConfig, overrides: Sequence[str]) -> ComposedJob:
    """One job of the sweep `cfg`, with an `error` if its values do not resolve.

    Raises SpecError if it does not compose.
    """
    with explained(command_of(app, cfg, overrides)):
        job = app.job_config(cfg, overrides, 0)
        users = users_part(job)
    try:
        config = without_directory(users, cast(Any, job.hydra))
    except SpecError as error:
        return ComposedJob(app, cfg, overrides, job, error=error)
    is_hooked = config.get(HOOKED) is not False
    return ComposedJob(
        app,
        cfg,
        overrides,
        job,
        config=hash_of(config),
        is_hooked=is_hooked,
        wants_baseline=is_hooked and bool(config.get("hooks")) and config.get("baseline") is True,
        has_number="${hydra:job." in str(OmegaConf.to_container(users, resolve=False)),
    )


def jobs_of(
    app: App, cfg: DictConfig, named: Sequence[Sequence[str]], most_refused: int
) -> list[ComposedJob]:
    """The jobs of a sweep: baselines first, and one of those without hooks that differ in their hooks alone.

    A job that does not compose has its `error`; after `most_refused` of these, the others are not composed.
    """
    refused = composed = 0

    def compose(overrides: Sequence[str]) -> ComposedJob:
        nonlocal refused, composed
        if refused >= most_refused:
            return ComposedJob(app, cfg, overrides)
        try:
            job = composed_job(app, cfg, overrides)
        except SpecError as error:
            job = ComposedJob(app, cfg, overrides, error=error)
        refused += job.error is not None
        composed += 1
        return job if composed <= MOST_KEPT else replace(job, cfg=None)

    jobs = [compose(overrides) for overrides in named]
    unhooked = {_without_hooks(job.overrides): job for job in reversed(jobs) if not job.is_hooked}
    fixed = {str(each.input_line) for each in app.swept(cfg) if not each.is_sweep_override()}
    baselines = dict[tuple[str, ...], list[str]]()
    for job in jobs:
        key = _without_hooks(job.overrides)
        if job.wants_baseline and key not in unhooked:
            kept = [
                text for text in job.overrides if text in key or (text in fixed and root_of(text) != HOOKED)
            ]
            baselines.setdefault(key, [*kept, f"{HOOKED}=false"])
    different = [job for job in jobs if job.is_hooked or unhooked[_without_hooks(job.overrides)] is job]
    return [*map(compose, baselines.values()), *different]


def _without_hooks(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if not is_about_hooks(text))


def hash_of(config: Mapping[str, Any]) -> str:
    """The hash of a configuration from `without_directory`; `hooked: true`, the default, does not change it."""
    told = {key: value for key, value in config.items() if key != HOOKED or value is not True}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def without_directory(users: DictConfig, hydra: Any) -> dict[str, Any]:
    """The configuration, resolved as if the job had the number 0 and no directory, which do not identify it.

    users: the user's part of the configuration
    hydra: Hydra's section
    """
    section: Any = OmegaConf.to_container(hydra, resolve=False)
    section["job"] |= {"num": 0, "id": "0"}
    section["sweep"] |= {"dir": ".", "subdir": "."}
    section["runtime"]["output_dir"] = "."
    holder: Any = HydraConfig.instance()
    outer = holder.cfg
    holder.cfg = OmegaConf.create({"hydra": section}, flags={"allow_objects": True})
    try:
        return plain(users)
    finally:
        holder.cfg = outer


def subdir_of(config: DictConfig) -> str:
    """The directory of a job, relative to the sweep's."""
    return os.path.normpath(str(config.hydra.sweep.subdir))

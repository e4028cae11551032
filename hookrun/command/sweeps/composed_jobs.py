"""The jobs of a sweep, each composed once, before the first of them runs."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from hookrun.command.compose.errors import explained
from hookrun.command.compose.hydra import App, Composition, numbered
from hookrun.engine.keys import root_of
from hookrun.errors import SpecError
from hookrun.report.sweep_facts import ABOUT_HOOKS, is_about_hooks
from hookrun.store.config.interpolations import literal, resolved
from hookrun.store.records import grouped

HOOKED = "hooked"
SUBDIR = "hydra.sweep.subdir"


MOST_KEPT = 1_000
"""The most configurations that a sweep keeps in memory; the jobs after these are composed again when they run."""


@dataclass(eq=False)
class ComposedJob:
    """One job of a sweep.

    app, sweep:    what composes it: the configuration of the sweep
    cfg:           its configuration with Hydra's section; None if it is not kept
    config:        the hash that identifies it when the sweep is resumed; "" if it was not composed
    is_hooked:     whether its hooks are installed; false for `hooked: false`
    without_hooks: the hash of what it is without hooks; "" if it has hooks and is not compared with a baseline
    has_number:    whether the user's part of the configuration refers to the number of the job
    error:         why it does not compose, else None
    number:        its `hydra.job.num`
    name:          of a resumed sweep, its directory, relative to the sweep's; None: `hydra.sweep.subdir` gives it
    exit_code:     of a job that has finished before; it is not run again
    run_dir:       its directory, which is known when it has been validated
    """

    app: App
    sweep: DictConfig
    overrides: Sequence[str]
    cfg: DictConfig | None = None
    config: str = ""
    is_hooked: bool = True
    without_hooks: str = ""
    has_number: bool = False
    error: SpecError | None = None
    number: int = 0
    name: str | None = None
    exit_code: int | None = None
    run_dir: Path = Path()

    def configuration(self) -> DictConfig:
        """The configuration with which the job runs."""
        if self.cfg is None:
            with explained(command_of(self.app, self.sweep, self.overrides)):
                cfg = self.app.job_config(self.sweep, self.overrides, self.number)
        else:
            cfg = numbered(copy.deepcopy(self.cfg), self.number)
        if self.name is not None:
            with read_write(cfg.hydra), open_dict(cfg.hydra):
                cfg.hydra.sweep.subdir = literal(self.name)
                cfg.hydra.overrides.hydra.append(subdir_override(self.name))
        return cfg


def subdir_override(name: str) -> str:
    """The override that sets the directory of a job, relative to the sweep's."""
    return f"{SUBDIR}={QuotedString(literal(name), Quote.single).with_quotes()}"


def command_of(app: App, cfg: DictConfig, overrides: Sequence[str]) -> Composition:
    """The composition of a job of the sweep `cfg`, or with no overrides that of the sweep itself."""
    shared: Any = OmegaConf.to_container(cfg.hydra.overrides.hydra)
    return Composition(app, cfg.hydra.job.config_name, [*shared, *overrides])


def composed_job(app: App, cfg: DictConfig, overrides: Sequence[str]) -> ComposedJob:
    """One job of the sweep `cfg`. Raises SpecError if it does not compose."""
    with explained(command_of(app, cfg, overrides)):
        job = app.job_config(cfg, overrides, 0)
        is_hooked = OmegaConf.select(job, HOOKED) is not False
        wants_baseline = is_hooked and bool(job.get("hooks")) and job.get("baseline") is True
        without = _without_hooks(job, overrides) if wants_baseline or not is_hooked else ""
    has_number = "${hydra:job." in str(written(job))
    return ComposedJob(app, cfg, overrides, job, hash_of(job), is_hooked, without, has_number)


def jobs_of(
    app: App, cfg: DictConfig, named: Sequence[Sequence[str]], most_refused: int
) -> list[ComposedJob]:
    """The jobs of a sweep: baselines first, and one of those without hooks that are otherwise the same.

    A job that does not compose has its `error`; after `most_refused` of these, the others are not composed.
    """
    composed = 0

    def compose(overrides: Sequence[str]) -> ComposedJob:
        nonlocal composed
        try:
            job = composed_job(app, cfg, overrides)
        except SpecError as error:
            job = ComposedJob(app, cfg, overrides, error=error)
        composed += 1
        if composed > MOST_KEPT:
            job.cfg = None
        return job

    jobs: list[ComposedJob] = []
    refused = 0
    for overrides in named:
        job = compose(overrides) if refused < most_refused else ComposedJob(app, cfg, overrides)
        refused += job.error is not None
        jobs.append(job)
    unhooked = {job.without_hooks: job for job in reversed(jobs) if not job.is_hooked}
    compared = [job for job in jobs if job.without_hooks and job.without_hooks not in unhooked]
    baselines: list[ComposedJob] = []
    for alike in grouped(compared, lambda job: job.without_hooks).values():
        own = [text for text in alike[0].overrides if root_of(text) != HOOKED]
        shared = [text for text in own if all(text in job.overrides for job in alike)]
        fewest = [text for text in shared if not is_about_hooks(text)]
        for kept in (fewest, shared, own):  # fewer, unless another key has a value of what is left out
            baseline = compose([*kept, f"{HOOKED}=false"])
            if baseline.without_hooks == alike[0].without_hooks:
                break
        baselines.append(baseline)
    listed = [*baselines, *(job for job in jobs if job.is_hooked or unhooked[job.without_hooks] is job)]
    for number, job in enumerate(listed):
        job.number = number
    return listed


def _without_hooks(cfg: DictConfig, overrides: Sequence[str]) -> str:
    """The hash of the resolved configuration of a job without what concerns hooks.

    Of one that cannot be resolved yet, as with the directory of its run, that of its overrides.
    """
    HydraConfig.instance().cfg = cast(Any, cfg)  # it may hold ${hydra:job.num}
    told = dict[str, Any]()
    try:
        for key in cfg.keys() - ABOUT_HOOKS - {"hydra"}:
            told[str(key)] = resolved(cfg[key]) if OmegaConf.is_config(cfg[key]) else cfg[key]
    except OmegaConfBaseException:
        told = {"overrides": [text for text in overrides if not is_about_hooks(text)]}
    return _hash(told)


def written(cfg: DictConfig) -> dict[str, Any]:
    """The user's part of a configuration, with its interpolations as they are written."""
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    return {key: value for key, value in content.items() if key != "hydra"}


def hash_of(cfg: DictConfig) -> str:
    """The hash by which a resumed sweep knows a job: of the user's part of its configuration, with interpolations.

    It depends neither on the number nor on the directory of the job, nor on `hooked: true`, which is the default.
    """
    told = {key: value for key, value in written(cfg).items() if key != HOOKED or value is not True}
    return _hash(told)


def made_of(app: App, cfg: DictConfig, named: Sequence[Sequence[str]]) -> str:
    """A hash that is equal only if the jobs of a sweep are: of its own configuration, and of their overrides.

    Empty if it chooses among configs, or adds keys: what is in their files is not a part of its own configuration.
    """
    varied = [each for each in app.swept(cfg) if each.is_sweep_override()]
    if any(each.is_add() or each.key_or_group in cfg.hydra.runtime.choices for each in varied):
        return ""
    return _hash({"sweep": written(cfg), "jobs": named})


def hash_with(made_of: str, configs: Iterable[str]) -> str:
    """The hash of a finished sweep: of what it is made of, and of its jobs' own hashes, in any order."""
    return _hash({"sweep": made_of, "jobs": sorted(configs)})


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def subdir_of(config: DictConfig) -> str:
    """The directory of a job, relative to the sweep's. Raises SpecError."""
    HydraConfig.instance().cfg = cast(Any, config)  # it may hold ${hydra:job.num}
    with explained():
        return os.path.normpath(str(config.hydra.sweep.subdir))

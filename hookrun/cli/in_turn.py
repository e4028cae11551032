"""Runs jobs one after the other in this process, as Hydra's basic launcher does, with less memory.

Hydra's launcher copies the `hydra` section six times for each job and keeps all copies to the end of the sweep. Here a
job is composed once, its section is not copied, and only its directory and its return value are kept afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import (
    JobReturn,
    JobRuntime,
    JobStatus,
    _flush_loggers,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import Container, DictConfig, OmegaConf

from hookrun.cli.config_copies import tell, tell_output_dir, users_part
from hookrun.cli.hydra import BASIC_LAUNCHER, BasicLauncher, numbered
from hookrun.cli.yaml_text import plain_of, text_of
from hookrun.store.stored_config import comes_back, remember

_DIR, _SUBDIR = "hydra.sweep.dir", "hydra.sweep.subdir"

log = logging.getLogger(BasicLauncher.__module__)
"""The logger of Hydra's launcher, so that the log lines look the same."""


def in_turn(launcher: Launcher) -> Launcher:
    """An `InTurn` in place of Hydra's basic launcher; any other launcher is returned as it is."""
    is_basic = f"{type(launcher).__module__}.{type(launcher).__name__}" == BASIC_LAUNCHER
    return InTurn(cast(BasicLauncher, launcher)) if is_basic else launcher


class InTurn(Launcher):
    """Runs the jobs of a basic launcher that Hydra has set up."""

    def __init__(self, launcher: BasicLauncher) -> None:
        self._launcher = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Does nothing: the launcher was set up when it was created."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; returns one JobReturn for each."""
        config, context, task = (
            self._launcher.config,
            self._launcher.hydra_context,
            self._launcher.task_function,
        )
        assert config is not None and context is not None and task is not None  # Hydra has set it up
        setup_globals()
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        log.info(f"Launching {len(job_overrides)} jobs locally")
        returned = list[JobReturn]()
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")
            cfg = numbered(context.config_loader.load_sweep_config(config, list(overrides)), number)
            needs_hydra = _needs_hydras_run_job(cfg.hydra)
            job = run_job(task, cfg, _DIR, _SUBDIR, context) if needs_hydra else _run(task, cfg)
            returned.append(_kept(job))
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        return returned


def _needs_hydras_run_job(hydra: Any) -> bool:
    """Whether the section has callbacks, or another working directory or environment, which `_run` does not support."""
    return bool(hydra.get("callbacks") or hydra.job.get("env_set") or hydra.job.get("chdir"))


def _run(task: TaskFunction, cfg: DictConfig) -> JobReturn:
    """Run one job, as Hydra's `run_job` does, without its copies of the configuration."""
    holder = HydraConfig.instance()
    outer = holder.cfg
    tell(cfg)
    folder = os.path.abspath(os.path.join(*(str(OmegaConf.select(cfg, key)) for key in (_DIR, _SUBDIR))))
    tell_output_dir(cfg, folder)
    try:
        job = JobReturn(hydra_cfg=cfg, working_dir=os.getcwd(), task_name=JobRuntime.instance().get("name"))
        job.overrides = cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.task))
        users = users_part(cfg)
        os.makedirs(folder, exist_ok=True)
        configure_log(cfg.hydra.job_logging, cfg.hydra.verbose)
        if (subdir := cfg.hydra.output_subdir) is not None:
            _save(Path(folder, str(subdir)), users, cfg.hydra)
        try:
            job.return_value = task(users)
            job.status = JobStatus.COMPLETED
        except Exception as error:  # passed to the sweeper, as Hydra's launcher does
            job.return_value = error
            job.status = JobStatus.FAILED
        _flush_loggers()
        return job
    finally:
        holder.cfg = outer


def _save(folder: Path, users: DictConfig, hydra: Container) -> None:
    """Write the files that Hydra's `run_job` writes into the directory of a job."""
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = {
        "config.yaml": plain_of(users),
        "hydra.yaml": {"hydra": plain_of(hydra)},
        "overrides.yaml": plain_of(cast(Any, hydra).overrides.task),
    }
    for name, content in contents.items():
        text = text_of(content)
        (folder / name).write_text(text, encoding="utf-8")
        if comes_back(content):
            remember(text, content)  # the page of the job reads it again


def _kept(job: JobReturn) -> JobReturn:
    """The job, with only its directory left of its configuration: a sweep may have thousands of jobs."""
    folder = str(cast(Any, job.hydra_cfg).hydra.runtime.output_dir)
    job.cfg = None
    job.hydra_cfg = OmegaConf.create({"hydra": {"runtime": {"output_dir": folder}}})
    return job

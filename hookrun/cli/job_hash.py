"""What a job of a sweep is known by when the sweep goes on: the hash of its resolved configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hookrun.cli.compose import plain
from hookrun.cli.errors import explained
from hookrun.cli.hydra import App
from hookrun.store.files import write_json
from hookrun.store.format import JOB
from hookrun.store.read_records import read_record
from hookrun.store.records import JobRecord

_CHANGES_NOTHING = ("hooks", "vars", "tags", "baseline")
"""Root keys in which two runs without hooks may differ and still be the same run."""


def job_record(users: DictConfig, hydra: Any) -> dict[str, Any]:
    """What job.json says of a job, see `JobRecord`: SHA-256 hashes of its resolved configuration.

    A value that holds the job's number or directory counts as the same whatever these are: they do not say which job
    it is.

    users: the user's part of the configuration
    hydra: Hydra's section
    """
    neutral: Any = OmegaConf.create(
        OmegaConf.to_container(hydra, resolve=False), flags={"allow_objects": True}
    )
    neutral.job.num, neutral.job.id = 0, "0"
    neutral.sweep.dir, neutral.sweep.subdir, neutral.runtime.output_dir = ".", ".", "."
    holder: Any = HydraConfig.instance()
    outer = holder.cfg
    holder.cfg = OmegaConf.create({"hydra": neutral}, flags={"allow_objects": True})
    try:
        config = plain(users)
    finally:
        holder.cfg = outer
    others = {key: value for key, value in config.items() if key not in _CHANGES_NOTHING}
    return {
        "config": _hash(config),
        "has_hooks": bool(config.get("hooks")),
        "without_hooks": _hash(others),
    }


def _hash(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


class JobHashes:
    """What the jobs of a sweep are known by, from their overrides, each job composed once."""

    def __init__(self, app: App, cfg: DictConfig) -> None:
        self._app, self._cfg = app, cfg
        self._known = dict[frozenset[str], dict[str, Any]]()

    def of(self, overrides: Sequence[str]) -> str:
        """The hash of one job. Raises SpecError where it does not compose."""
        return str(self.record(overrides)["config"])

    def record(self, overrides: Sequence[str]) -> dict[str, Any]:
        """What job.json would say of one job. Raises SpecError where it does not compose."""
        key = frozenset(overrides)
        if key not in self._known:
            with explained():
                job = self._app.job_config(self._cfg, overrides, 0)
                hydra: Any = job.hydra
                users = OmegaConf.masked_copy(job, [str(each) for each in job if each != "hydra"])
                self._known[key] = job_record(users, hydra)
        return self._known[key]


def write_job(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Write job.json. Raises StoreError."""
    write_json(run_dir / JOB, record)


def read_job(run_dir: Path) -> str:
    """The hash in job.json. Raises StoreError."""
    return str(read_record(run_dir / JOB, JobRecord)["config"])

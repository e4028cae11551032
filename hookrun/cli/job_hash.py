"""The hash of the resolved configuration of a job, which identifies the job when its sweep is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hookrun.cli.compose import plain
from hookrun.cli.config_copies import users_part
from hookrun.cli.errors import explained
from hookrun.cli.hydra import App
from hookrun.store.files import write_json
from hookrun.store.format import JOB
from hookrun.store.read_records import read_record
from hookrun.store.records import JobRecord

_CHANGES_NOTHING = ("hooks", "vars", "tags", "baseline")
"""Root keys that do not matter when two runs without hooks are compared."""


def job_record(users: DictConfig, hydra: Any) -> dict[str, Any]:
    """The content of job.json, see `JobRecord`: SHA-256 hashes of the job's resolved configuration.

    users: the user's part of the configuration
    hydra: Hydra's section
    """
    return record_of(without_place(users, hydra)[0])


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of job.json for a configuration from `without_place`."""
    others = {key: value for key, value in config.items() if key not in _CHANGES_NOTHING}
    return {
        "config": _hash(config),
        "has_hooks": bool(config.get("hooks")),
        "without_hooks": _hash(others),
    }


def without_place(users: DictConfig, hydra: Any) -> tuple[dict[str, Any], bool]:
    """The configuration, resolved as if the job had the number 0 and no directory; and whether this changed nothing.

    The number and the directory of a job do not identify it, so a value that holds them must not change the hash.
    Where no value refers to Hydra's section, the result is the configuration of the job itself.

    users: the user's part of the configuration
    hydra: Hydra's section
    """
    holder: Any = HydraConfig.instance()
    outer, nowhere = holder.cfg, _Nowhere(hydra)
    holder.cfg = nowhere
    try:
        return plain(users), "hydra" not in vars(nowhere)
    finally:
        holder.cfg = outer


class _Nowhere:
    """Stands in for the configuration in `HydraConfig`; its section is built when a value refers to it."""

    def __init__(self, section: Any) -> None:
        self._section = section

    @cached_property
    def hydra(self) -> Any:
        """Hydra's section of a job with the number 0."""
        found: Any = OmegaConf.create(
            OmegaConf.to_container(self._section, resolve=False), flags={"allow_objects": True}
        )
        found.job.num, found.job.id = 0, "0"
        found.sweep.dir, found.sweep.subdir, found.runtime.output_dir = ".", ".", "."
        return OmegaConf.create({"hydra": found}, flags={"allow_objects": True}).hydra


def _hash(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


class JobHashes:
    """The hashes of a sweep's jobs, from their overrides; each job is composed once."""

    def __init__(self, app: App, cfg: DictConfig) -> None:
        self._app, self._cfg = app, cfg
        self._known = dict[frozenset[str], dict[str, Any]]()

    def of(self, overrides: Sequence[str]) -> str:
        """The hash of one job. Raises SpecError where the job does not compose."""
        return str(self.record(overrides)["config"])

    def record(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The content of job.json for one job. Raises SpecError where the job does not compose."""
        key = frozenset(overrides)
        if key not in self._known:
            with explained():
                job = self._app.job_config(self._cfg, overrides, 0)
                hydra: Any = job.hydra
                self._known[key] = job_record(users_part(job), hydra)
        return self._known[key]


def write_job(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Write job.json. Raises StoreError."""
    write_json(run_dir / JOB, record, flushes_folder=False)  # writing the status afterwards flushes it


def read_job(run_dir: Path) -> str:
    """The hash in job.json. Raises StoreError."""
    return str(read_record(run_dir / JOB, JobRecord)["config"])

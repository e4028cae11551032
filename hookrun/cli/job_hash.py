"""What a job of a sweep is known by when the sweep goes on: the hash of its resolved configuration."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.cli.compose import plain
from hookrun.store.files import write_json
from hookrun.store.format import JOB
from hookrun.store.read_records import read_record
from hookrun.store.records import JobRecord


def job_hash(users: DictConfig, hydra: Any) -> str:
    """The SHA-256 of a job's resolved configuration.

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
        text = json.dumps(plain(users), sort_keys=True, default=str)
    finally:
        holder.cfg = outer
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of(job: DictConfig) -> str:
    """The hash of a whole configuration, `hydra` included."""
    users = copy.deepcopy(job)
    with read_write(users), open_dict(users):
        hydra = users.pop("hydra")
    return job_hash(users, hydra)


def write_job(run_dir: Path, config: str) -> None:
    """Write job.json. Raises StoreError."""
    write_json(run_dir / JOB, {"config": config})


def read_job(run_dir: Path) -> str:
    """The hash in job.json. Raises StoreError."""
    return str(read_record(run_dir / JOB, JobRecord)["config"])

"""The study of a sweeper that chooses its jobs by their objective, kept in the sweep's directory.

In a resumed sweep the sweeper starts again with the same seed and chooses the same jobs. A job that is over is not run:
its stored value is returned at once. The study is therefore that of a sweep that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.report.yaml_files import MULTIRUN
from hookrun.store.files import Lines, StoreError, os_reason, replacing
from hookrun.store.format import STUDY

DATABASE = "study.db"
NAME = "hookrun"


class Study:
    """Writes study.jsonl: a line for each job that the sweeper chose."""

    def __init__(self, sweep_dir: Path) -> None:
        """Start an empty file. Raises StoreError."""
        _remove(sweep_dir / STUDY)
        self._lines = Lines(sweep_dir / STUDY)

    def add(self, job: str, params: Mapping[str, str], value: float | None) -> None:
        """Add a job; a value that is not finite counts as none. Raises StoreError."""
        finite = value if value is not None and math.isfinite(value) else None
        self._lines.append({"number": self._lines.count, "job": job, "params": dict(params), "value": finite})


def prepare_study(cfg: DictConfig, sweep_dir: Path, seed: int) -> str:
    """Store the sweep's configuration, and let Optuna keep its own study beside it; returns a message about that.

    seed: the seed for a sampler whose own seed is null
    """
    with replacing(sweep_dir / MULTIRUN) as file:
        file.write(OmegaConf.to_yaml(cfg).encode())
    sweeper = cfg.hydra.sweeper
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        sampler = sweeper.get("sampler")
        if OmegaConf.is_dict(sampler) and sampler.get("seed", 0) is None:
            sampler.seed = seed % 2**32  # what NumPy's generators take
        if "storage" not in sweeper or sweeper.storage is not None:
            return ""
        if not _has_database():
            return (
                f"study: {sweep_dir / STUDY}; the installed Optuna keeps a database of its own "
                "beside it only with 'sqlalchemy<2' 'alembic<1.16'"
            )
        _remove(sweep_dir / DATABASE)
        sweeper.storage = f"sqlite:///{sweep_dir / DATABASE}"
        sweeper.study_name = sweeper.get("study_name") or NAME
    return f"study: {sweep_dir / STUDY}, and for Optuna's own tools {DATABASE} beside it"


def _has_database() -> bool:
    """Whether Optuna's database works: that of Optuna 2 fails with SQLAlchemy 2."""
    try:
        return _major("optuna") > 2 or _major("sqlalchemy") < 2
    except PackageNotFoundError:
        return False


def _major(package: str) -> int:
    return int(version(package).partition(".")[0])


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {os_reason(error)}") from error

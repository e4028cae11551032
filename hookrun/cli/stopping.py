"""A sweep that ends at its first failed job: the file that tells the other jobs, and the record in sweep.json."""

from __future__ import annotations

from pathlib import Path

from hookrun.cli.launching import SweepStopped
from hookrun.store.files import StoreError, os_reason, write_json
from hookrun.store.format import SWEEP
from hookrun.store.read_records import read_record
from hookrun.store.records import SweepRecord

STOP = ".stop"
"""A file in the directory of the sweep: a job failed, and no other job may start."""


def forget_stop(sweep_dir: Path) -> None:
    """Remove the files that an earlier start of the sweep left. Raises StoreError."""
    for name in (STOP, SWEEP):
        try:
            (sweep_dir / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot remove {sweep_dir / name}: {os_reason(error)}") from error


def keep_count(sweep_dir: Path, jobs: int) -> None:
    """Write sweep.json: how many jobs the sweep has. Raises StoreError."""
    write_json(sweep_dir / SWEEP, {"jobs": jobs})


def keep_stop(sweep_dir: Path, stopped: SweepStopped) -> None:
    """Add to sweep.json which job ended the sweep. Raises StoreError."""
    path = sweep_dir / SWEEP
    known = read_record(path, SweepRecord) if path.exists() else {}
    write_json(path, {**known, "fail_fast": True, "stopped_by": stopped.job})
    (sweep_dir / STOP).unlink(missing_ok=True)

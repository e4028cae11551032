"""The record of the job that ended a sweep, in the sweep's directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hookrun.cli.launching import SweepStopped
from hookrun.cli.stopping import STOP, forget_stop, keep_count, keep_stop
from hookrun.store.files import StoreError


def test_the_job_that_ended_a_sweep_is_recorded_beside_the_number_of_jobs_and_removed_later(
    cwd: Path,
) -> None:
    keep_count(cwd, 4)
    (cwd / STOP).touch()
    keep_stop(cwd, SweepStopped("1", 1))
    kept = {"jobs": 4, "fail_fast": True, "stopped_by": "1"}
    assert json.loads((cwd / "sweep.json").read_text()) == kept
    assert not (cwd / STOP).exists()
    (cwd / STOP).touch()
    for _ in range(2):
        forget_stop(cwd)
    assert list(cwd.iterdir()) == []
    (cwd / STOP).mkdir()
    with pytest.raises(StoreError, match="cannot remove"):
        forget_stop(cwd)

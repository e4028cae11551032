"""A run that captured something, and one that uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hookrun.run.experiment.settings import Settings
from hookrun.run.tasks import parse_experiment
from hookrun.store.run_dir import RunDir

CONFIG: dict[str, Any] = {
    "model": {"name": "cnn", "factory": None, "args": {}, "weights": None},
    "data": {"name": "digits", "root": None, "args": {}, "transforms": {}},
    "task": {"name": "predict", "split": "val"},
    "seed": 0,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Samples 10, 12, 14 of val captured at `fc`: row i holds its sample twice; `both` captured two tensors.

    `splits` captured samples of the same numbers of train too: their rows are 100 larger.
    """
    made = RunDir.create(tmp_path / "run")
    made.set_status("running")
    ids = [14, 10, 12]
    rows = torch.tensor(ids, dtype=torch.float16)[:, None].repeat(1, 2)
    at: dict[str, Any] = {"sample_ids": ids, "epoch": 0, "step": 0, "call": 0, "split": "val"}
    made.captures.add("seen", "fc", rows, **at)
    made.captures.add("both", "fc", (rows, rows * 2), **at)
    made.captures.add("splits", "fc", rows, **at)
    made.captures.add("splits", "fc", rows + 100, **{**at, "split": "train"})
    made.captures.add("firing", "fc", torch.ones(5, 2), **{**at, "sample_ids": None})
    made.write("plan.json", {"hash": "ab" * 32, "model": "CNN", "hooks": [
        {"name": "seen", "targets": [{"path": "fc", "class": "Linear", "shape": "[3, 2]"}]}
    ]})  # fmt: skip
    (made.path / ".hydra").mkdir()
    (made.path / ".hydra/config.yaml").write_text(json.dumps(CONFIG))
    made.close()
    made.write_manifest()
    made.set_status("done")
    return made.path


@pytest.fixture
def settings() -> Settings:
    """The settings of a run of the same model, data and seed."""
    return parse_experiment({"model": {"name": "cnn"}, "data": {"name": "digits"}, "hooks": {}}).settings

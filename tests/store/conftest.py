"""Runs that several test files read and damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import save_weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three shards of captures and a checkpoint, of a run that failed and has no manifest."""
    made = RunDir.create(tmp_path / "run", buffer=12_000)  # shards of 4,000 bytes
    made.set_status("running")
    for step in range(3):
        made.captures.add(
            "h", "m", torch.full((4, 100), float(step)), sample_ids=range(4), epoch=0, step=step, call=0
        )
        made.captures.flush()
    save_weights(nn.Linear(2, 2), made.checkpoints / "last.safetensors")
    made.log_metrics(step=1)
    made.close()
    made.set_status("failed", "an error")
    return made.path


@pytest.fixture
def whole(run: Path) -> Path:
    """The same run with every file of a finished run, and its manifest."""
    made = RunDir(run)
    made.set_status("running")
    made.write("plan.json", {"hooks": [{"name": "h", "targets": [{"path": "m"}]}]})
    made.write(
        "model.json", {"class": "M", "modules": [{"path": "", "names": [""], "class": "M", "parameters": 6}]}
    )
    made.log_metrics(split="train", step=2, loss=0.5)
    made.log_metrics(split="val", step=2, loss=0.25)
    save_weights(nn.Linear(2, 2), made.checkpoints / "best.safetensors")
    made.predictions.add(
        "predictions", "output", torch.ones(2, 3), sample_ids=[0, 1], epoch=0, step=0, call=0
    )
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out").write_bytes(b"events")
    (run / "exported.pt2").write_bytes(b"program")
    made.close()
    made.write_manifest()
    made.set_status("done")
    (run / "report.html").write_text("made afterwards")
    return run

"""The same hooks give the same results in hookrun's own run and in a loop by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.testing import assert_close

import hookrun
from hookrun import data, models
from hookrun.cli import main
from hookrun.data.settings import Data
from hookrun.engine.runtime import Installation
from hookrun.models.settings import Model

EPOCHS = 2
BATCHES = 6
SIZE = 16


@pytest.mark.parametrize("accumulate", [1, 3])
def test_hookruns_own_run_equals_a_loop_by_hand(accumulate: int, tmp_path: Path) -> None:
    hooks = by_hand(accumulate)
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/own.yaml").write_text(json.dumps(HOOKS))
    command = [
        "model=mlp", "model.args.hidden=[32,32]", f"data.batch_size={SIZE}", "train.shuffle=false", "strict=true",
        f"train.epochs={EPOCHS}", f"train.limit_batches={BATCHES}", f"train.accumulate={accumulate}",
        "train.optimizer.name=SGD", "train.optimizer.lr=0.1", "+train.optimizer.momentum=0.9",
        "compute.device=cpu", f"hydra.run.dir={tmp_path / 'run'}", "hooks=own", "--config-dir", str(tmp_path),
    ]  # fmt: skip
    assert main(command) == 0
    run = hookrun.open_run(tmp_path / "run")
    assert_close(load_file(run.path / "checkpoints/last.safetensors"), dict(hooks._model.state_dict()))
    for path, gradients in hooks.captures["gradients"].items():
        assert len(gradients) == EPOCHS * BATCHES // accumulate
        assert_close(run.captures["gradients"][path][:], torch.stack(gradients))
    assert_close(run.captures["outputs"]["layers.3"][:], torch.cat(hooks.captures["outputs"]["layers.3"]))
    for line, record in zip(
        [each for each in run.stats if each["hook"] == "norms"], hooks.records, strict=True
    ):
        assert (line["step"], line["epoch"], line["norm"]) == (
            record["step"], record["epoch"], pytest.approx(record["norm"]),
        )  # fmt: skip


HOOKS: dict[str, dict[str, Any]] = {
    "clip": {"select": "layers.2", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01},
    "norm": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.5},
    "soften": {
        "select": "layers.1", "hook": "output_grad", "action": "scale", "factor": 0.5,
        "when": {"step": {"start": 2, "every": 2}},
    },
    "limit": {"select": "layers.3", "hook": "forward", "action": "clamp", "max": 0.5, "when": {"epoch": [1]}},
    "halve": {"select": "fc", "hook": "post_accumulate_grad", "action": "scale", "factor": 0.5},
    "gradients": {"select": "**.weight", "hook": "post_accumulate_grad", "action": "capture"},
    "outputs": {"select": "layers.3", "hook": "forward", "action": "capture", "when": {"mode": "train"}},
    "norms": {"select": "layers.2.weight", "hook": "optimizer_step_post", "action": "stats", "of": ["norm"]},
}  # fmt: skip
"""Edits and observers of every kind of schedule."""


def by_hand(accumulate: int) -> Installation:
    """The hooks after a loop over the first batches of hookrun's own run."""
    torch.manual_seed(0)
    config = Model(name="mlp", args={"hidden": [32, 32]})
    net = models.build(config, sample_shape=(1, 8, 8), num_classes=10, trust=frozenset())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    samples: Any = data.load(Data(name="digits"), "train", seed=0)
    with hookrun.hooked(net, HOOKS) as hooks:
        for _ in range(EPOCHS):
            for number in range(BATCHES):
                images, labels = samples.batch(range(number * SIZE, (number + 1) * SIZE))
                hooks.accumulating = (number + 1) % accumulate > 0
                (functional.cross_entropy(net(images), labels) / accumulate).backward()
                if not hooks.accumulating:
                    optimizer.step()
                    optimizer.zero_grad()
                    hooks.step()
            hooks.epoch()
    return hooks

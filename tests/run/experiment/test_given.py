"""A module and data given from Python: the same run as with those that the configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookrun import open_run
from hookrun.command.cli.commands import execute
from hookrun.command.outcome import Outcome
from hookrun.run.experiment.given import Given

Pairs = list[tuple[torch.Tensor, int]]


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def pairs(count: int = 12) -> Pairs:
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return [(image, place % 10) for place, image in enumerate(images)]


def run(folder: Path, *overrides: str, code: int = 0, **given: Any) -> Any:
    outcome = Outcome()
    assert execute([f"hydra.run.dir={folder}", *overrides], outcome, Given(**given)) == code
    return open_run(outcome.run_dir or folder)


class TestPlumbing:
    def test_a_given_module_is_run_on_given_data(self, tmp_path: Path) -> None:
        module, data = network(), pairs()
        made = run(tmp_path / "run", "task=evaluate", "train.loss=cross_entropy", model=module, data=data)
        inputs = torch.stack([image for image, _ in data])
        labels = torch.tensor([label for _, label in data])
        with torch.no_grad():
            loss = nn.functional.cross_entropy(module(inputs), labels)
        assert made.metrics[-1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert made.config["model"]["name"] == made.config["data"]["name"] == "given"

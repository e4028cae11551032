"""`hooks=watch`: silent while a training is healthy, and loud, by module, step and number, where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import hookrun
from hookrun.models.decoder import Decoder

WATCH = yaml.safe_load((Path(__file__).parents[2] / "conf" / "hooks" / "watch.yaml").read_text())
COUNT = 60


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Sigmoid(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    )


def trained(model: nn.Module, lr: float = 0.001, plant: Callable[[int, Tensor], Tensor] | None = None) -> Any:
    """The records of a training, as (hook, module, step, units)."""
    torch.manual_seed(1)
    data = torch.randn(640, 8)
    target = data @ torch.randn(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    with hookrun.hooked(model, WATCH) as hooks:
        for step in range(COUNT):
            rows = torch.randint(640, (64,))
            x = data[rows] if plant is None else plant(step, data[rows])
            optimizer.zero_grad()
            hooks.loss = loss = nn.functional.mse_loss(model(x), target[rows])
            loss.backward()
            optimizer.step()
        told = list[tuple[Any, ...]]()
        for record in hooks.records:
            told.append((record["hook"], record["module"], record["step"], record.get("units")))
        return told


def test_a_healthy_training_is_silent() -> None:
    assert trained(network()) == []


def test_a_learning_rate_times_1000_is_told() -> None:
    assert ("large_updates", "2.weight", 0, None) in trained(network(), lr=1.0)


def test_dead_units_are_told_by_number() -> None:
    model = network()
    nn.init.constant_(model[0].bias[3:], -10)  # type: ignore[index,arg-type]
    assert ("dead_units", "1", 40, list(range(3, 16))) in trained(model)


def test_saturated_units_are_told_by_number() -> None:
    model = network()
    nn.init.constant_(model[2].bias[:12], 20)  # type: ignore[index,arg-type]
    nn.init.constant_(model[4].bias[4:], -20)  # type: ignore[index,arg-type]
    told = trained(model)
    assert ("saturated_sigmoids", "3", 40, list(range(12))) in told
    assert ("saturated_tanhs", "5", 40, list(range(4, 16))) in told


def test_gradients_that_vanish_are_told() -> None:
    model = network()
    nn.init.constant_(model[2].bias, 60)  # type: ignore[arg-type]
    assert ("unstable_gradients", "0.weight", 40, None) in trained(model)


def test_a_batch_out_of_scale_is_told_at_its_step() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    told = trained(model, plant=lambda step, x: x * 1000 if step == 50 else x)
    assert [each for each in told if each[0] != "large_updates"] == [
        ("loss_spikes", "", 50, None),
        ("unstable_gradients", "0.weight", 50, None),
    ]


def test_a_batch_with_nan_is_told_at_its_step() -> None:
    told = trained(network(), plant=lambda step, x: x.fill_(math.nan) if step == 10 else x)
    assert {hook for hook, _, step, _ in told if step == 10} >= {"loss_spikes", "unstable_gradients"}


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_neurons_of_a_decoder_are_watched_along_the_last_dimension(activation: str) -> None:
    model = Decoder(vocab_size=9, length=6, width=8, layers=1, heads=2, activation=activation)
    nn.init.constant_(model.get_parameter("blocks.0.mlp.pre.bias"), -10)
    with hookrun.hooked(
        model, {name: hook for name, hook in WATCH.items() if hook["hook"] == "forward"}
    ) as hooks:
        for step in range(50):
            hooks.loss = 1.0
            model(torch.randint(9, (4, 3 + step % 3)))
            hooks.step()
    found = [(record["module"], record["units"]) for record in hooks.records]
    assert found == ([("blocks.0.mlp.act", list(range(32)))] if activation == "relu" else [])


def test_weights_of_every_name_are_watched() -> None:
    plan = hookrun.compile({"unstable_gradients": WATCH["unstable_gradients"]}, nn.LSTM(4, 8))
    assert [match.path for match in plan.hooks[0].matches] == ["weight_ih_l0", "weight_hh_l0"]


def test_the_plan_tells_which_dimension_has_units() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    told = "dead_units: units: dimension 1 of [2, 5, 16] is taken, since ReLU does not show which one it is"
    sequence = ((torch.ones(2, 5, 8),), {})
    assert told in str(hookrun.compile(WATCH, model, example=sequence))
    assert "units:" not in str(hookrun.compile(WATCH, model, example=((torch.ones(2, 8),), {})))
    said = {**WATCH, "dead_units": {**WATCH["dead_units"], "dim": -1}}
    assert "units:" not in str(hookrun.compile(said, model, example=sequence))

"""The context of a firing, as a user's own function gets it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions.site import HookContext


def test_it_describes_the_current_firing() -> None:
    seen = list[HookContext]()

    def look(value: Tensor, context: HookContext) -> None:
        seen.append(context)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    spec = {"h": {"select": "0", "hook": "forward", "action": look}}
    with hookrun.hooked(model, spec) as hooks:
        for number in range(2):
            model.train(number == 0)
            model(torch.ones(1, 2))
            hooks.step()
    assert [(each.hook, each.hook_type, each.path, each.mode, each.step) for each in seen] == [
        ("h", "forward", "0", "train", 0),
        ("h", "forward", "0", "eval", 1),
    ]
    assert all(each.module is model[0] for each in seen)
    with pytest.raises(FrozenInstanceError):
        seen[0].step = 7  # type: ignore[misc]


def test_its_generator_draws_the_same_in_every_run_and_differently_at_each_firing() -> None:
    def shaken(value: Tensor, context: HookContext) -> Any:
        return value + torch.rand(value.shape, generator=context.generator(value))

    def outputs() -> list[Tensor]:
        model = nn.Identity()
        with hookrun.hooked(model, {"h": {"select": "", "hook": "forward", "action": shaken}}):
            return [model(torch.zeros(3)) for _ in range(2)]

    state = torch.get_rng_state()
    first, second = outputs()
    assert not torch.equal(first, second)
    assert all(map(torch.equal, outputs(), (first, second)))
    assert torch.equal(torch.get_rng_state(), state), "the run's own generator is left alone"

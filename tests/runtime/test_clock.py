"""The clock counts each step once, however the loop reports it, and a schedule requires all of its conditions."""

from __future__ import annotations

import torch
from torch import nn

from hookrun.runtime.clock import Clock, gate
from hookrun.spec.when import When


def test_steps_are_those_of_the_first_optimizer_until_the_loop_counts_them() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    clock = Clock(model)
    in_graphs = clock.followed_in_graphs(torch.tensor(-1), lambda: clock.step)
    own, second, foreign = (torch.optim.SGD(each.parameters()) for each in (model, model, other))
    clock.stepped(foreign, foreign.param_groups[0]["params"])
    assert clock.step == 0
    clock.stepped(own, own.param_groups[0]["params"])
    clock.stepped(second, second.param_groups[0]["params"])
    assert clock.step == 1
    clock.advance()  # the step that the optimizer has counted already
    assert clock.step == 1
    clock.advance()
    clock.stepped(own, own.param_groups[0]["params"])
    assert clock.step == 2 and in_graphs == 2


def test_a_schedule_requires_all_of_its_conditions() -> None:
    clock = Clock(nn.Identity())
    assert gate(When(), clock, lambda: 0, lambda: 0.0) is None
    when = When.model_validate({"step": 2, "mode": "train", "probability": 0.5})
    chance = 0.2
    is_open = gate(when, clock, lambda: 0, lambda: chance)
    assert is_open is not None and not is_open()
    clock.step = 2
    assert is_open()
    clock.model.eval()
    assert not is_open()
    clock.model.train()
    chance = 0.5
    assert not is_open()

"""The clock counts each step and call once, however the loop reports them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookrun.runtime.clock import Calls, Clock, gate
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


def test_calls_are_numbered_within_a_forward_and_counted_over_all() -> None:
    clock, module = Clock(nn.Identity()), nn.Identity()
    calls, seen = Calls(clock), list[tuple[int, int]]()
    for forward in (1, 1, 2):
        clock.forward.number = forward
        calls.count(module)
        seen.append(calls.now[:2])
    assert seen == [(0, 0), (1, 1), (0, 2)] and calls.total == 3
    again = Calls(clock)
    again.load_state_dict(calls.state_dict())
    again.count(module)
    assert again.now[:2] == (1, 3)


def test_a_repeated_call_has_the_number_of_the_first() -> None:
    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.count(self)
            seen.append(calls.now[:2])
            return x.sin()

    module, seen = Counted(), list[tuple[int, int]]()
    for reentrant in (False, True):
        calls = Calls(Clock(module))
        seen.clear()
        x = torch.ones(2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(module, x, use_reentrant=reentrant)
        x.sum().backward()
        assert sorted(seen) == sorted([(0, 0), (1, 1)] * 2) and calls.total == 2, reentrant


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

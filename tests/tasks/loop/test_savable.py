"""A user's own optimizer or schedule whose state cannot be saved is an error before the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hookrun.tasks.loop.savable import unsavable_optimizer, unsavable_schedule


class Plain(SGD):
    """Its state is numbers and tensors."""


class WithFunction(SGD):
    """Its state has a function after a step, which a file cannot hold."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["rule"] = lambda gradient: gradient
        return super().step(closure)


def plain(parameters: list[nn.Parameter]) -> Optimizer:
    return Plain(parameters, lr=0.1, momentum=0.9)


def test_the_state_after_a_step_is_tried_without_drawing_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert unsavable_optimizer(plain, "train.optimizer") == []
    (problem,) = unsavable_optimizer(lambda each: WithFunction(each, lr=0.1), "train.optimizer")
    assert problem.where == "train.optimizer.name"
    assert "the state of WithFunction cannot be saved" in problem.what and "state_dict()" in problem.hint
    assert torch.equal(torch.get_rng_state(), before)


class OwnSchedule(LambdaLR):
    """Its state has an object of a user's class."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "model": nn.Linear(1, 1)}


def test_a_user_s_schedule_is_tried_and_torch_s_are_not() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert unsavable_schedule(None, "train.scheduler") == []
    assert unsavable_schedule(LambdaLR(optimizer, lambda step: 1.0), "train.scheduler") == []
    (problem,) = unsavable_schedule(OwnSchedule(optimizer, lambda step: 1.0), "train.scheduler")
    assert problem.where == "train.scheduler.name"
    assert "OwnSchedule cannot be saved" in problem.what and "model is a torch.nn" in problem.what

"""Followers are called before each step of every optimizer, while the gradients exist, and after it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hookrun.runtime.optimizers import follow


class Follower:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.heard = list[tuple[str, float, float]]()

    def _note(self, when: str) -> None:
        grad = self.weight.grad
        self.heard.append((when, self.weight.item(), 0.0 if grad is None else grad.item()))

    def before(self, optimizer: Optimizer) -> None:
        self._note("before")

    def after(self, optimizer: Optimizer) -> None:
        self._note("after")


def test_a_follower_is_called_once_around_each_step_with_or_without_a_closure() -> None:
    for with_closure in (False, True):
        weight = nn.Parameter(torch.tensor(1.0))
        optimizer, follower = SGD([weight], lr=0.5), Follower(weight)

        def closure(weight: nn.Parameter = weight) -> torch.Tensor:
            loss = weight * 2
            loss.backward()
            return loss

        unfollow = follow(follower.before, follower.after)
        try:
            if with_closure:
                loss = optimizer.step(closure)  # type: ignore[arg-type]
                assert isinstance(loss, torch.Tensor) and loss.item() == 2.0
            else:
                closure()
                optimizer.step()
        finally:
            unfollow()
        assert follower.heard == [("before", 1.0, 2.0), ("after", 0.0, 2.0)], with_closure
        optimizer.step()
        assert len(follower.heard) == 2

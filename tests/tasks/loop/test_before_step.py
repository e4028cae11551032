"""The state before a step: generators and buffers are restored, also buffers that a batch made NaN."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.runtime import Installation
from hookrun.tasks.loop.before_step import BeforeStep


class Buffers(nn.Module):
    """A module with buffers that are written in place, replaced, or unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + x.sum(0)
        found: Tensor = self.norm(x)
        return found


@pytest.fixture
def model() -> nn.Module:
    return Buffers()


@pytest.fixture
def hooks(model: nn.Module) -> Iterator[Installation]:
    noise = {"select": "norm", "hook": "forward", "action": "noise", "std": 1.0}
    with hookrun.hooked(model, {"n": noise}) as hooks:
        yield hooks


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def test_generators_are_those_before_the_step_within_the_block_only(
    model: nn.Module, hooks: Installation
) -> None:
    before = BeforeStep(model, hooks, torch.device("cpu"), own_code=True)
    draws()
    before.take()
    first = draws()
    torch.manual_seed(5)
    with before.generators():
        assert draws() == first
    after = float(torch.rand(()))
    torch.manual_seed(5)
    assert float(torch.rand(())) == after


def test_a_copy_repeats_the_step_with_its_buffers_and_random_numbers(
    model: nn.Module, hooks: Installation
) -> None:
    before, x = BeforeStep(model, hooks, torch.device("cpu"), own_code=False), torch.randn(4, 2)
    for _ in range(3):
        before.take()
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        expected = model(x)
    copy = Buffers()
    noise = {"select": "norm", "hook": "forward", "action": "noise", "std": 1.0}
    with hookrun.hooked(copy, {"n": noise}) as others:
        before.fill(copy, others)
        assert all(torch.equal(buffer, state[name]) for name, buffer in copy.named_buffers())
        assert torch.equal(copy(x), expected)


def test_only_modules_whose_buffers_became_nan_are_restored(model: nn.Module, hooks: Installation) -> None:
    before = BeforeStep(model, hooks, torch.device("cpu"), own_code=False)
    model(torch.ones(2, 2))
    before.take()
    mean, variance = model.norm.running_mean.clone(), model.norm.running_var.clone()
    model(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]))
    before.restore_buffers()
    assert torch.equal(model.norm.running_mean, mean) and torch.equal(model.norm.running_var, variance)
    assert model.norm.num_batches_tracked == 2, "it counts batches, not values"
    assert model.replaced.tolist() == [2.0, 2.0], "this buffer was replaced by another tensor"
    model(torch.ones(2, 2))
    before.restore_buffers()
    assert model.replaced.tolist() == [4.0, 4.0], "what is finite stays"

"""Small data and a plain loop to compare the Trainers with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun


@pytest.fixture
def spec() -> dict[str, Any]:
    """A gradient edit, a capture in evaluation, statistics and a rule on the loss in training."""
    return {
        "clamp": {
            "select": "net.2", "hook": "post_accumulate_grad", "action": "clamp", "min": -0.01, "max": 0.01,
        },
        "seen": {"select": "net.0", "hook": "forward", "action": "capture", "when": {"mode": "eval"}},
        "trained": {
            "select": "net.0", "hook": "forward", "action": "stats", "of": ["mean"], "when": {"mode": "train"},
        },
        "loss": {
            "select": "net", "hook": "forward", "action": "check", "of": "loss", "over": {"steps": 1}, "max": 0,
            "policy": "warn", "when": {"mode": "train"},
        },
    }  # fmt: skip


BATCH = 4
ACCUMULATE = 2
EPOCHS = 2
RATE = 0.5


@pytest.fixture(scope="session")
def samples() -> tuple[Tensor, Tensor]:
    """[22, 4] and [22]: six batches, of which the last is shorter."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(22, 4, generator=generator), torch.randint(0, 3, (22,), generator=generator)


def batches(samples: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(BATCH) for part in samples), strict=True))


def by_hand(net: nn.Module, samples: tuple[Tensor, Tensor]) -> nn.Module:
    """Train as the Trainers do, with the gradients of the last layer clamped once for each step."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        seen = batches(samples)
        for start in range(0, len(seen), ACCUMULATE):
            optimizer.zero_grad()
            for inputs, target in seen[start : start + ACCUMULATE]:
                (nn.functional.cross_entropy(net(inputs), target) / ACCUMULATE).backward()
            for parameter in net[2].parameters():  # type: ignore[index]
                parameter.grad.clamp_(-0.01, 0.01)
            optimizer.step()
    return net


def loss_of_first_step(net: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    losses = [nn.functional.cross_entropy(net(x), target) for x, target in batches(samples)[:ACCUMULATE]]
    return float(sum(losses) / ACCUMULATE)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def is_unhooked(model: nn.Module) -> bool:
    of_modules = [
        (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks) for each in model.modules()
    ]
    of_parameters = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in model.parameters()]
    return not any(hooks for group in [*of_modules, *of_parameters] for hooks in group)


def check_a_fit(run: hookrun.Run, first_loss: float) -> None:
    """Check steps, epochs, rows and the first loss of a fit with an evaluation after each epoch."""
    assert run.status["status"] == "done"
    trained = [line for line in run.stats if line["hook"] == "trained"]
    assert [line["step"] for line in trained] == sorted([*range(3 * EPOCHS)] * 2)
    assert [line["epoch"] for line in trained] == [line["step"] // 3 for line in trained]
    (loss,) = [line for line in run.stats if line["hook"] == "loss"]
    assert (loss["step"], loss["number"]) == (0, pytest.approx(first_loss))
    rows = run.captures["seen"]["net.0"]
    assert rows.sample_ids.tolist() == [*range(22)] * EPOCHS
    assert set(rows.calls.tolist()) == {0}
    assert rows.epochs.tolist() == [0] * 22 + [1] * 22
    assert set(rows.splits) == {"val"}
    assert rows.steps[:22].tolist() == [number // BATCH for number in range(22)]
    fired = {(site["hook"], site["fired"]) for site in run.hooks["sites"]}
    assert fired == {("clamp", 6), ("seen", 12), ("trained", 12), ("loss", 12)}


@pytest.fixture(scope="session")
def plain() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(
        by_hand=by_hand,
        same=same,
        unhooked=is_unhooked,
        check_a_fit=check_a_fit,
        loss_of_first_step=loss_of_first_step,
    )


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a library appear not to be installed."""
    kept = dict(sys.modules)

    def without(library: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"hookrun.integrations.{library}", raising=False)
        monkeypatch.delitem(vars(hookrun.integrations), library, raising=False)

    yield without
    monkeypatch.undo()
    sys.modules.update({name: module for name, module in kept.items() if name not in sys.modules})

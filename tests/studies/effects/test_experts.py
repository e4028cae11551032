"""task=effects over the experts of mixtures: each cell equals a plain forward pass without them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hookrun
from hookrun.report import write_report

DIGITS = ("data.batch_size=5", "train.limit_batches=2")
TASK = ("task=effects", "task.hook=h", "task.metric=loss", *DIGITS)
DROPPED = '+hooks.h={select: "*.experts", hook: forward_pre, action: drop_expert}'
NETS = """
    from mixtures import Mixture
    from torch import nn
    import torch


    def rows():
        torch.manual_seed(0)
        tokens = nn.Unflatten(1, (8, 8))
        return nn.Sequential(nn.Flatten(), tokens, Mixture(8, 3), Mixture(8, 5), nn.Flatten(), nn.Linear(64, 10))
"""

ROUTED = """
    from mixtures import Router
    from torch import nn
    import torch


    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router(8, 4, 2)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            _, shares, chosen = self.router(x)
            mixed = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                *row, place = torch.where(chosen == number)
                mixed.index_put_(tuple(row), expert(x[*row]) * shares[*row, place, None], accumulate=True)
            return x + mixed


    def rows():
        torch.manual_seed(0)
        tokens = nn.Unflatten(1, (8, 8))
        return nn.Sequential(nn.Flatten(), tokens, Routed(), Routed(), nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def net(trusted: Any) -> tuple[str, ...]:
    """A model in which the rows of a picture are tokens, with mixtures of 3 and 5 experts."""
    trusted(nets=NETS)
    return ("model=python", "model.factory=nets:rows")


def test_each_expert_is_a_cell(executed: Any, net: tuple[str, ...]) -> None:
    made = executed(
        *TASK, DROPPED, "task.over={module: each, experts: each}", "task.method=[exact,gradient]", *net
    )
    found = made.effects
    assert found.axes == {"module": ["2.experts", "3.experts"], "experts": [0, 1, 2, 3, 4]}
    assert found["exact"].isnan().tolist() == [[False] * 3 + [True] * 2, [False] * 5]
    for row, count in enumerate((3, 5)):
        for expert in range(count):
            wanted = by_hand(net, f"{row + 2}.experts", [expert])
            torch.testing.assert_close(found["exact_samples"][row, expert], wanted, rtol=1e-5, atol=1e-5)
    assert found["gradient"].isfinite().equal(found["exact"].isfinite())
    page = write_report(made.path).read_text()
    assert "across: experts; down: module" in page


def test_windows_drop_neighbours_together(executed: Any, net: tuple[str, ...]) -> None:
    over = "task.over={module: [3.experts], experts: {window: 2, stride: 2}}"
    found = executed(*TASK, DROPPED, over, *net).effects
    assert found.axes["experts"] == ["0:2", "2:4", "4:5"]
    for column, experts in enumerate(([0, 1], [2, 3], [4])):
        wanted = by_hand(net, "3.experts", experts)
        torch.testing.assert_close(found["exact_samples"][0, column], wanted, rtol=1e-5, atol=1e-5)


def test_an_expert_that_a_module_lacks_is_refused(executed: Callable[..., Any], net: tuple[str, ...]) -> None:
    with pytest.raises(hookrun.HookrunError, match=r"on 2\.experts: there is no expert 3: it has 3"):
        executed(*TASK, DROPPED, "task.over={experts: [0, [1, 3]]}", *net)
    with pytest.raises(hookrun.HookrunError, match="experts"):
        executed(
            *TASK,
            "+hooks.h={select: '2', hook: forward, action: scale, factor: 0}",
            "task.over={experts: each}",
            *net,
        )


def test_experts_that_are_modules_make_circuits(executed: Any, refused: Any, net: Any, trusted: Any) -> None:
    said = refused(*TASK, DROPPED, "task.over={experts: each}", "task.circuit={sizes: [1], rest: 0}", *net)
    assert "select them and move the hook over {module: each}" in said
    trusted(routed=ROUTED)
    routed = ("model=python", "model.factory=routed:rows")
    each = '+hooks.h={select: "*.experts.*", hook: forward, action: scale, factor: 0}'
    circuit = "task.circuit={sizes: [1, 3, 6], rest: 0}"
    found = executed(*TASK, each, "task.over={module: each}", circuit, *routed).effects
    model, data = hookrun.build(overrides=["compute.device=cpu", *routed, *DIGITS])
    model.eval()
    batches = list(itertools.islice(data.loader("val"), 2))

    def loss(left_out: list[str]) -> float:
        handles = [model.get_submodule(path).register_forward_hook(zeroed) for path in left_out]
        with torch.no_grad():
            losses = [F.cross_entropy(model(batch.inputs), batch.target) for batch in batches]
        for handle in handles:
            handle.remove()
        return float(sum(losses)) / len(losses)

    paths = found.axes["module"]
    by_size = sorted(paths, key=lambda path: abs(loss([path]) - loss([])))
    for place, size in enumerate((1, 3, 6)):
        kept = loss(by_size[:-size]) - loss(paths)
        assert float(found["circuit"][place]) == pytest.approx(kept / (loss([]) - loss(paths)), abs=1e-3)


def zeroed(module: Any, args: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def by_hand(overrides: tuple[str, ...], path: str, experts: list[int]) -> Tensor:
    """[samples]: the loss if the module's experts are left out, their weights shared among the others of a token."""
    model, data = hookrun.build(overrides=["compute.device=cpu", *overrides, *DIGITS])
    model.eval()

    def drop(module: Any, args: Any, arguments: dict[str, Tensor]) -> Any:
        shares = arguments["shares"].clone()
        for row, chosen in zip(shares.flatten(0, 1), arguments["chosen"].flatten(0, 1), strict=True):
            total = row.sum()
            for place, number in enumerate(chosen.tolist()):
                if number in experts:
                    row[place] = 0
            if row.sum():
                row *= total / row.sum()
        return args, {**arguments, "shares": shares}

    model.get_submodule(path).register_forward_pre_hook(drop, with_kwargs=True)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(batch.inputs), batch.target, reduction="none")
            for batch in itertools.islice(data.loader("val"), 2)
        ]
    return torch.cat(losses).double()

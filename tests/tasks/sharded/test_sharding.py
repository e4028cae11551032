"""Sharding with fully_shard: what cannot be sharded is reported before the run, and states are whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from hookrun.plan.plan import ResolvedPlan
from hookrun.spec import Settings
from hookrun.spec.experiment import Fsdp
from hookrun.tasks.sharded.sharding import shard_problems, sharded_states, units, whole_state, whole_states


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.head.weight


def problems(wrap: Any, model: nn.Module, *actions: Any) -> list[tuple[str, str]]:
    settings = SimpleNamespace(compute=SimpleNamespace(fsdp=Fsdp.model_validate({"wrap": wrap})))
    hooks = [
        SimpleNamespace(spec=SimpleNamespace(action=each, name="h", where="hooks.h")) for each in actions
    ]
    plan = cast(ResolvedPlan, SimpleNamespace(hooks=hooks))
    return [(each.where, each.what) for each in shard_problems(cast(Settings, settings), model, plan)]


def test_inner_modules_are_units_before_those_around_them_and_the_root_is_none() -> None:
    assert units(Fsdp(), Net()) == []
    found = units(Fsdp.model_validate({"wrap": "**"}), Net())
    assert "" not in found and set(found) >= {"blocks.0", "blocks.0.0", "head"}
    depths = [path.count(".") for path in found]
    assert depths == sorted(depths, reverse=True)


def test_what_cannot_be_sharded_is_an_error() -> None:
    model, where = Net(), "compute.fsdp.wrap"
    assert problems("blocks.*", model) == []
    assert problems("layers.*", model) == [(where, "'layers.*' matches no module")]
    ((at, what),) = problems("blocks", model)
    assert at == where and what.startswith("blocks is a list or dict of modules")
    model.head.temperature = nn.Parameter(torch.ones(()))
    ((at, what),) = problems("blocks.*", model)
    assert at == "compute.strategy" and "without dimensions: head.temperature" in what


def test_a_hook_that_adds_a_scalar_parameter_is_an_error_and_a_vector_is_not() -> None:
    def adds(**more: Any) -> SimpleNamespace:
        return SimpleNamespace(adds=lambda name: f"{name}_value", **more)

    vector, number = adds(value=[0.0], shape=(1,)), adds(value=0.5)
    neither = SimpleNamespace(adds=lambda name: None, value=0.5)
    ((at, what),) = problems(None, Net(), vector, neither, number)
    assert at == "hooks.h.action" and "the hook adds one" in what
    assert len(problems(None, Net(), adds(shape=()))) == 1


def test_the_state_is_whole_with_shared_weights_once_and_empty_where_it_is_not_kept() -> None:
    model = Net()
    kept = whole_state(model, keeps=True)
    assert kept.keys() == model.state_dict().keys()
    assert all(torch.equal(each, kept[name]) for name, each in model.state_dict().items())
    assert kept["head.weight"] is kept["tied.weight"]
    dropped = whole_state(model, keeps=False)
    assert dropped.keys() == kept.keys() and not any(each.numel() for each in dropped.values())


def test_the_state_of_an_optimizer_is_read_back_equal() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model.blocks[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = whole_states(optimizer)
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(sharded_states(saved, again))
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict())

"""Plain values with tensors in them: read back as they were, types of keys and shared tensors included."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn, optim

from hookrun.store.format import decode, encode
from hookrun.store.tree import NotPlain, flatten, unflatten
from hookrun.tasks.loop.optimizers import optimizers, schedulers


def through_json(tree: Any) -> Any:
    values, tensors = flatten(tree)
    return unflatten(decode(encode(values).encode()), tensors.__getitem__)


def test_types_survive() -> None:
    shared = torch.arange(4)
    tree = {
        "numbers": [None, True, 3, -0.0, 1e-300, math.inf],
        "texts": ["NaN", "tensor", "\\Infinity", "\ud800"],
        1: (2, "b", ()),
        (3, "k"): Counter({5: 2}),
        "generator": random.getstate(),
        "first": shared,
        "again": [shared],
        "empty": [torch.empty(0, 3), torch.empty(0)],
    }
    found = through_json(tree)

    assert {key: found[key] for key in found if key not in ("first", "again", "empty")} == {
        key: tree[key] for key in tree if key not in ("first", "again", "empty")
    }
    assert math.copysign(1, found["numbers"][3]) == -1 and type(found[3, "k"]) is Counter
    assert found["first"] is found["again"][0] and found["first"].equal(shared)
    assert [each.shape for each in found["empty"]] == [(0, 3), (0,)]


def test_nan_survives() -> None:
    assert math.isnan(through_json({"x": math.nan})["x"])


UNPLAIN = {
    "object": object(),
    "set": {1, 2},
    "function": lambda: 0,
    "device": torch.device("cpu"),
    "sparse": torch.ones(2).to_sparse(),
    "bytes": b"x",
}


@pytest.mark.cases("value", UNPLAIN.values())
def test_what_is_not_plain_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(NotPlain, match=r"^optimizer\.3\.x"):
        flatten({"optimizer": {3: {"x": value}}})


@pytest.mark.cases(
    "value", [{"a": 1, "b": 2}, {"code": "x"}, {"items": [[[1], 2]]}, {"keys": 3}, {"items": 3}, {}]
)
def test_what_flatten_did_not_write_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError):
        unflatten(value, {}.__getitem__)


def test_every_optimizer_and_schedule_of_torch_survives() -> None:
    """Their own classes are not tried before a run, so here each is."""
    more = {
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [1, 2]},
        "ExponentialLR": {"gamma": 0.5},
    }
    more |= {"OneCycleLR": {"max_lr": 1.0, "total_steps": 9}, "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0}}
    more |= {"CosineAnnealingLR": {"T_max": 5}, "CosineAnnealingWarmRestarts": {"T_0": 5}}
    for name, cls in optimizers().items():
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2).to_sparse() if name == "SparseAdam" else torch.ones(2, 2)
        made = cls([weight], lr=0.1)  # type: ignore[call-arg]
        made.step()
        loaded = cls([weight], lr=0.2)  # type: ignore[call-arg]
        loaded.load_state_dict(through_json(made.state_dict()))
        assert str(loaded.state_dict()) == str(made.state_dict()), name
    for name, scheduler in schedulers().items():
        if name == "SWALR":
            more[name] = {"swa_lr": 0.1}
        optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        step = scheduler(optimizer, **more.get(name, {}))
        assert through_json(step.state_dict()) == step.state_dict(), name

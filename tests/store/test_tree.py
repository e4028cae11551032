"""Plain values with tensors in them are read back equal, with types of keys and shared tensors."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn, optim

from hookrun.store.format import decode, encode
from hookrun.store.states.tree import NotPlain, flatten, unflatten
from hookrun.tasks.training.optimizers import OPTIMIZERS, SCHEDULERS


def through_json(tree: Any) -> Any:
    values, tensors = flatten(tree)
    return unflatten(decode(encode(values).encode()), tensors.__getitem__)


def test_types_are_read_back() -> None:
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


def test_nan_is_read_back() -> None:
    assert math.isnan(through_json({"x": math.nan})["x"])


UNPLAIN = {
    "object": object(),
    "set": {1, 2},
    "function": lambda: 0,
    "device": torch.device("cpu"),
    "sparse": torch.ones(2).to_sparse(),
    "bytes": b"x",
}


@pytest.mark.parametrize("value", UNPLAIN.values())
def test_other_values_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(NotPlain, match=r"^optimizer\.3\.x"):
        flatten({"optimizer": {3: {"x": value}}})


@pytest.mark.parametrize(
    "value", [{"a": 1, "b": 2}, {"code": "x"}, {"items": [[[1], 2]]}, {"keys": 3}, {"items": 3}, {}]
)
def test_invalid_input_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError):
        unflatten(value, {}.__getitem__)


def test_the_state_of_every_optimizer_and_schedule_of_torch_is_read_back() -> None:
    """A user's own classes cannot be checked before a run; torch's are checked here."""
    more = {
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [1, 2]},
        "ExponentialLR": {"gamma": 0.5},
    }
    more |= {"OneCycleLR": {"max_lr": 1.0, "total_steps": 9}, "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0}}
    more |= {"CosineAnnealingLR": {"T_max": 5}, "CosineAnnealingWarmRestarts": {"T_0": 5}}
    for name, cls in OPTIMIZERS.items():
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2).to_sparse() if name == "SparseAdam" else torch.ones(2, 2)
        made = cls([weight], lr=0.1)  # type: ignore[call-arg]
        made.step()
        loaded = cls([weight], lr=0.2)  # type: ignore[call-arg]
        loaded.load_state_dict(through_json(made.state_dict()))
        assert str(loaded.state_dict()) == str(made.state_dict()), name
    for name in sorted(set(SCHEDULERS) - {"ChainedScheduler", "SequentialLR"}):
        if name == "SWALR":
            more[name] = {"swa_lr": 0.1}
        optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        step = SCHEDULERS[name](optimizer, **more.get(name, {}))
        assert through_json(step.state_dict()) == step.state_dict(), name

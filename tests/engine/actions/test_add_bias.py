"""`add_bias` with a trained bias; its constant values are tested with those of `scale`."""

from __future__ import annotations

import pytest
import torch
from fake_site import FakeSite

from hookrun.engine.actions.add_bias import AddBias
from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, HOOK_TYPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainable_bias_learns_in_its_own_dtype(dtype: torch.dtype) -> None:
    action = AddBias(value=[1, 2], trainable=True)
    site = FakeSite(action)
    biased = action.build(site)(torch.zeros(3, 2, dtype=dtype))
    assert torch.equal(biased, torch.tensor([[1, 2]] * 3, dtype=dtype))
    biased.sum().backward()
    assert site.bias.dtype == torch.float32
    assert torch.equal(site.bias.grad, torch.tensor([3.0, 3.0]))


def test_an_optimizer_step_takes_effect_at_the_next_call() -> None:
    action = AddBias(value=1, trainable=True)
    site = FakeSite(action)
    add = action.build(site)
    with torch.no_grad():
        site.bias += 4
    assert add(torch.zeros(2)).tolist() == [5, 5]


def test_a_trainable_bias_is_for_forward_hook_types_only() -> None:
    fits = {hook for hook in AddBias.hook_types if AddBias(value=0, trainable=True).carried_by(hook) is None}
    assert fits == {FORWARD, FORWARD_PRE}
    assert AddBias(value=0).adds("shift") is None
    for hook in HOOK_TYPES.values():
        assert AddBias(value=0).carried_by(hook) is None

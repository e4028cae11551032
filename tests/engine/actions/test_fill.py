"""`fill`: the module's own parameters, set in place."""

from __future__ import annotations

import pytest
import torch
from fake_site import build
from torch import nn

from hookrun.engine.actions.fill import Fill
from hookrun.engine.actions.own_parameters import LAZY
from hookrun.engine.hook_types import APPLY


@pytest.fixture
def module() -> nn.Module:
    """A linear layer with a child."""
    module = nn.Linear(3, 2)
    module.child = nn.Linear(3, 2)
    return module


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def test_parameters_of_children_are_left_alone(module: nn.Module) -> None:
    child = module.child.weight.clone()
    assert build(Fill(value=0.5))(module) is None
    assert torch.equal(module.weight, torch.full((2, 3), 0.5))
    assert torch.equal(module.bias, torch.full((2,), 0.5))
    assert torch.equal(module.child.weight, child)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_list_is_broadcast(dtype: torch.dtype, module: nn.Module) -> None:
    build(Fill(value=[0.1, 2, 3], parameters="weight"))(module.to(dtype))
    assert torch.equal(module.weight, torch.tensor([[0.1, 2, 3]] * 2, dtype=dtype))


def test_the_parameter_stays_the_same_object(module: nn.Module) -> None:
    weight = module.weight
    build(Fill(value=0))(module)
    assert module.weight is weight
    assert weight.requires_grad
    assert weight.is_leaf


def test_a_tensor_that_does_not_broadcast_is_refused(module: nn.Module) -> None:
    fill = build(Fill(value={"file": "f.safetensors"}), values={"value": torch.ones(4)})
    with pytest.raises(ValueError, match=r"shape \[4\], .*shape \[2, 3\]"):
        fill(module)


def test_parameters_that_do_not_fit_are_refused_in_words(module: nn.Module) -> None:
    reason = Fill(value=0).incompatibility(APPLY, nn.Sequential(module), [])
    assert reason == "the module has no parameters of its own: select the ones of its children that have"
    reason = Fill(value=0, parameters=["bais"]).incompatibility(APPLY, module, names(module))
    assert reason == "the module has no parameter 'bais': did you mean 'bias'?"
    reason = Fill(value=[1, 2, 3]).incompatibility(APPLY, module, names(module))
    assert reason is not None
    assert reason.startswith("parameter 'bias': the value has shape [3]")
    lazy = nn.LazyLinear(2)
    assert Fill(value=0).incompatibility(APPLY, lazy, names(lazy)) == f"parameter 'weight': {LAZY}"

"""`prune`: the elements that torch.nn.utils.prune sets to 0, in place."""

from __future__ import annotations

import copy
from typing import Any
from zlib import crc32

import pytest
import torch
from fake_site import build
from pydantic import ValidationError
from torch import nn
from torch.nn.utils import prune

import hookrun
from hookrun.actions.prune import Prune
from hookrun.runtime import Installation

METHODS: dict[str, dict[str, Any]] = {
    "l1_unstructured": {},
    "random_unstructured": {"seed": 3},
    "ln_structured": {"n": 1.0, "dim": 1},
    "random_structured": {"dim": -1, "seed": 3},
}


def apply(model: nn.Module, **keys: Any) -> None:
    with hookrun.hooked(model, {"h": {"hook": "apply", "action": "prune", **keys}}):
        pass


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("amount", [0.3, 2, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_elements_are_those_of_torch(method: Any, amount: float, dtype: torch.dtype) -> None:
    module = nn.Linear(6, 4, dtype=dtype).requires_grad_(False)
    other, weight, state = copy.deepcopy(module), module.weight, torch.get_rng_state()
    keys = dict(METHODS[method])
    build(Prune(amount=amount, method=method, **keys))(module)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(keys.pop("seed", 0) + crc32(b"fc.weight"))
    getattr(prune, method)(other, "weight", amount=amount, **keys)
    assert torch.equal(weight, other.weight)
    assert module.weight is weight and not weight.requires_grad
    assert torch.equal(module.bias, other.bias)


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_of_two_modules_is_pruned_once(method: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    alone = copy.deepcopy(model)
    apply(model, select="type:Linear", amount=0.5, method=method, **METHODS[method])
    apply(alone, select="0", amount=0.5, method=method, **METHODS[method])
    assert torch.equal(model[1].weight, alone[0].weight)
    assert model[1].weight is model[0].weight


def test_a_resumed_model_is_not_pruned_again() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    plan = hookrun.compile({"h": {"select": "0", "hook": "apply", "action": "prune", "amount": 0.5}}, model)
    trained = model[0].weight.detach().clone()
    with Installation(plan, model, restored=plan.applied()):
        assert torch.equal(model[0].weight, trained)


def test_complex_weights_have_absolute_values_and_what_torch_lacks_is_refused_in_words() -> None:
    module = nn.Linear(6, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"random_unstructured of torch\.complex64: "):
        build(Prune(amount=0.5, method="random_unstructured"))(module)
    build(Prune(amount=0.5))(module)
    assert module.weight.eq(0).sum() == 12


def test_nan_is_not_small_and_an_empty_parameter_stays_empty() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[float("nan"), 1.0], [float("inf"), -2.0]]))
    build(Prune(amount=2))(module)
    assert module.weight[:, 1].eq(0).all() and module.weight[0, 0].isnan()
    module.weight = nn.Parameter(torch.empty(0, 2))
    build(Prune(amount=0.5))(module)
    assert module.weight.shape == (0, 2)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"amount": 7}, "there are 6 to prune, not 7"),
        ({"amount": 3, "method": "ln_structured"}, "there are 2 to prune, not 3"),
        (
            {"amount": 0.5, "method": "ln_structured", "parameters": "bias"},
            "'bias': ln_structured needs two dimensions",
        ),
        (
            {"amount": 0.5, "method": "random_structured", "dim": 2},
            "needs two dimensions and `dim` among them",
        ),
        ({"amount": 0.5, "parameters": "wieght"}, "did you mean 'weight'"),
    ],
)
def test_what_cannot_be_pruned_is_refused_before_it_is_installed(keys: dict[str, Any], what: str) -> None:
    spec = {"hooks": {"h": {"select": "0", "hook": "apply", "action": "prune", **keys}}}
    with pytest.raises(hookrun.CompileError, match=what):
        hookrun.compile(spec, nn.Sequential(nn.Linear(3, 2)))


def test_a_module_without_a_weight_is_refused() -> None:
    with pytest.raises(hookrun.CompileError, match="no parameters of its own"):
        apply(nn.Sequential(nn.ReLU()), select="0", amount=0.5)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"amount": 1.5}, "amount"),
        ({"amount": -1}, "amount"),
        ({"amount": True}, "amount"),
        ({"amount": float("nan")}, "amount"),
        ({"amount": 0.5, "n": 1.0}, "`n` does not go with l1_unstructured"),
        ({"amount": 0.5, "dim": 1}, "`dim` does not go with l1_unstructured"),
        ({"amount": 0.5, "seed": 1, "method": "ln_structured"}, "`seed` does not go with ln_structured"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        Prune(**keys)

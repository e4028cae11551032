"""`prune`: the elements that torch.nn.utils.prune sets to 0, in place, and keeps at 0."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from zlib import crc32

import pytest
import torch
from fake_site import build
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, prune
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

import hookrun
from hookrun.engine.actions.prune import Prune

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
    other = copy.deepcopy(module)
    weight = module.weight
    state = torch.get_rng_state()
    keys = dict(METHODS[method])
    build(Prune(amount=amount, method=method, **keys), module=module)(module)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(keys.pop("seed", 0) + crc32(b"fc.weight"))
    getattr(prune, method)(other, "weight", amount=amount, **keys)
    assert torch.equal(weight, other.weight)
    assert module.weight is weight
    assert not weight.requires_grad
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


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda them: SGD(them, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda them: Adam(them, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW": lambda them: AdamW(them, lr=0.1, fused=True),
    "LBFGS": lambda them: LBFGS(them, lr=0.1, max_iter=3),
}
HALF = {"hook": "apply", "action": "prune", "amount": 0.5}


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> list[float]:
    """The norms of the gradients before they are clipped."""
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    norms = list[float]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), torch.arange(32) % 3)
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.01).item())
        return loss

    for _ in range(steps):
        if isinstance(optimizer, LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return norms


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["l1_unstructured", "ln_structured"])
def test_a_pruned_model_trains_as_under_the_mask_of_torch(optimizer: str, method: str) -> None:
    keys = {"n": 2.0, "dim": 0} if method == "ln_structured" else {}
    model = network()
    by_hand = network()
    for layer in (0, 2):
        getattr(prune, method)(by_hand[layer], "weight", amount=0.5, **keys)
    expected = train(by_hand, OPTIMIZERS[optimizer](by_hand.parameters()))
    with hookrun.hooked(model, {"h": {"select": ["0", "2"], **HALF, "method": method, **keys}}):
        norms = train(model, OPTIMIZERS[optimizer](model.parameters()))
    assert norms == pytest.approx(expected, rel=1e-4)
    by_hand(torch.zeros(1, 6))  # computes the weights
    for layer in (0, 2):
        torch.testing.assert_close(model[layer].weight, by_hand[layer].weight)
        assert model[layer].weight[by_hand[layer].weight_mask == 0].eq(0).all()


def test_pruned_elements_stay_0_after_any_write() -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    train(model, optimizer)  # it has a momentum
    noise = {"select": "0.weight", "action": "noise"}
    spec = {
        "h": {"select": "0", **HALF},
        "filled": {"select": "0.weight", "hook": "apply", "action": "fill", "value": 1},
        "one": {"hook": "grad", **noise},
        "other": {"hook": "optimizer_step_post", **noise},
    }
    pruned = model[0].weight.abs() <= model[0].weight.abs().median()
    with hookrun.hooked(model, spec):
        train(model, optimizer)
        assert torch.equal(model[0].weight == 0, pruned)
        model.load_state_dict(network().state_dict())  # back to the initial weights
        model(torch.zeros(1, 6))
        assert torch.equal(model[0].weight == 0, pruned)
    train(model, optimizer)
    assert model[0].weight.ne(0).all(), "nothing is left of the hook"
    assert not model[0].weight._backward_hooks
    assert not model._forward_pre_hooks


def test_a_step_of_other_parameters_leaves_an_open_graph_alone() -> None:
    model = network()
    other = nn.Linear(3, 1)
    both = SGD([*other.parameters(), *model.parameters()], lr=0.1)
    with hookrun.hooked(model, {"h": {"select": "0", **HALF}}):
        output = model(torch.ones(2, 6))
        other(output.detach()).sum().backward()
        both.step()
        output.sum().backward()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.eq(0).sum() == 24


def test_each_hook_prunes_what_earlier_ones_have_left() -> None:
    model = network()
    by_hand = network()
    prune.l1_unstructured(by_hand[0], "weight", 0.5)
    prune.ln_structured(by_hand[0], "weight", 0.5, n=1, dim=0)
    prune.l1_unstructured(by_hand[0], "weight", 3)
    channels = {"method": "ln_structured", "n": 1.0}
    apply_all = {"a": HALF, "b": {**HALF, **channels}, "c": {**HALF, "amount": 3}}
    with hookrun.hooked(model, {name: {"select": "0", **keys} for name, keys in apply_all.items()}):
        assert torch.equal(model[0].weight, by_hand[0].weight)


@pytest.mark.parametrize("method", ["l1_unstructured", "ln_structured"])
def test_importance_scores_are_compared_instead_of_the_weights(method: str) -> None:
    keys = {"n": 2.0, "dim": 0} if method == "ln_structured" else {}
    model = network().bfloat16()
    by_hand = network().bfloat16()
    scores = torch.randn(8, 6)
    getattr(prune, method)(by_hand[0], "weight", amount=0.5, importance_scores=scores, **keys)
    apply(model, select="0", amount=0.5, method=method, importance_scores=scores, **keys)
    assert torch.equal(model[0].weight, by_hand[0].weight)
    spec = {"h": {"select": "0", **HALF, "importance_scores": torch.randn(6)}}
    with pytest.raises(hookrun.HookrunError, match=r"importance_scores has shape \[6\], .*'weight' \[8, 6\]"):
        hookrun.compile(spec, network(), example=((torch.zeros(1, 6),), {}))


@pytest.mark.parametrize("saves_the_hooks", [True, False])
def test_a_model_that_is_loaded_again_keeps_its_elements_at_0(saves_the_hooks: bool) -> None:
    spec = {"h": {"select": "0", **HALF}}
    model = network()
    later = network(seed=2)
    with hookrun.hooked(model, spec) as hooks:
        state = model.state_dict()
        of_hooks = hooks.state_dict()
    if not saves_the_hooks:
        later.load_state_dict(state)
    with hookrun.hooked(later, spec) as hooks:
        if saves_the_hooks:
            later.load_state_dict(state)
            hooks.load_state_dict(of_hooks)
        train(later, OPTIMIZERS["Adam"](later.parameters()))
    assert torch.equal(later[0].weight == 0, model[0].weight == 0)


@pytest.mark.parametrize(
    "layer", [nn.Embedding(4, 6, sparse=True), nn.Conv2d(2, 2, 3)], ids=["sparse", "nhwc"]
)
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_any_layout_are_masked(layer: nn.Module, frozen: bool) -> None:
    model = nn.Sequential(copy.deepcopy(layer).requires_grad_(not frozen))
    inputs = torch.tensor([0, 1]) if isinstance(layer, nn.Embedding) else torch.ones(1, 2, 3, 3)
    if isinstance(layer, nn.Conv2d):
        model.to(memory_format=torch.channels_last)
    with hookrun.hooked(model, {"h": {"select": "0", **HALF}}):
        pruned = model[0].weight == 0
        with torch.inference_mode() if frozen else nullcontext():
            output = model(inputs)
        if not frozen:
            output.sum().backward()
            SGD(model.parameters(), lr=0.1).step()
    assert pruned.sum() == pruned.numel() / 2
    assert model[0].weight[pruned].eq(0).all()


def test_complex_weights_are_pruned_by_absolute_value() -> None:
    module = nn.Linear(6, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"random_unstructured of torch\.complex64: "):
        build(Prune(amount=0.5, method="random_unstructured"), module=module)(module)
    build(Prune(amount=0.5), module=module)(module)
    assert module.weight.eq(0).sum() == 12


def test_nan_is_not_pruned_as_small() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[float("nan"), 1.0], [float("inf"), -2.0]]))
    build(Prune(amount=2), module=module)(module)
    assert module.weight[:, 1].eq(0).all()
    assert module.weight[0, 0].isnan()
    module.weight = nn.Parameter(torch.empty(0, 2))
    build(Prune(amount=0.5), module=module)(module)
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


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"amount": 1.5}, r"found 1.5, expected a fraction from 0.0 to 1.0, or a whole number of"),
        ({"amount": -1}, "found -1, expected a fraction"),
        ({"amount": True}, "found True, expected a fraction"),
        ({"amount": float("nan")}, "found nan, expected a fraction"),
        ({"amount": "0.5"}, "found '0.5', expected a fraction"),
        ({"amount": 0.5, "n": 1.0}, "`n` does not go with l1_unstructured"),
        ({"amount": 0.5, "dim": 1}, "`dim` does not go with l1_unstructured"),
        ({"amount": 0.5, "seed": 1, "method": "ln_structured"}, "`seed` does not go with ln_structured"),
        ({"amount": 0.5, "importance_scores": 1}, "importance_scores: found a number"),
        (
            {"amount": 0.5, "importance_scores": [1], "method": "random_structured"},
            "`importance_scores` does not go with random_structured",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        Prune(**keys)

"""`init`: the functions of torch.nn.init, with a generator for each parameter."""

from __future__ import annotations

from typing import Any, get_args
from zlib import crc32

import pytest
import torch
from fake_site import build
from pydantic import ValidationError
from torch import Tensor, nn

import hookrun
from hookrun.engine.actions.init import Init, Name

ARGS: dict[str, dict[str, Any]] = {"constant_": {"val": 0.5}, "sparse_": {"sparsity": 0.5}}


def drawn(name: str, like: Tensor, parameter: str, seed: int = 3, **args: Any) -> Tensor:
    """What torch.nn.init makes with a generator of that seed."""
    function = getattr(nn.init, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + crc32(parameter.encode()))
        if name in ("constant_", "dirac_", "eye_", "ones_", "zeros_"):
            return function(torch.empty_like(like), **args)
        generator = torch.Generator().manual_seed(seed + crc32(parameter.encode()))
        return function(torch.empty_like(like), generator=generator, **args)


def apply(model: nn.Module, **keys: Any) -> None:
    with hookrun.hooked(model, {"h": {"hook": "apply", "action": "init", **keys}}):
        pass


def test_these_are_the_initialisers_of_torch() -> None:
    public = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    assert sorted(public) == sorted(get_args(Name))


@pytest.mark.parametrize("name", get_args(Name))
def test_each_function_gives_what_torch_gives(name: Any) -> None:
    module = nn.Conv1d(4, 6, 3) if name == "dirac_" else nn.Linear(6, 4)
    module.requires_grad_(False)
    weight = module.weight
    state = torch.get_rng_state()
    build(Init(name=name, args=ARGS.get(name, {}), seed=3, parameters="weight"))(module)
    assert torch.equal(weight, drawn(name, weight, "fc.weight", **ARGS.get(name, {})))
    assert module.weight is weight
    assert not weight.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_any_precision_have_the_numbers_of_torch(dtype: torch.dtype) -> None:
    module = nn.Linear(6, 4).to(dtype)
    build(Init(name="xavier_uniform_", args={"gain": 2.0}, seed=3))(module)
    assert torch.equal(module.weight, drawn("xavier_uniform_", module.weight, "fc.weight", gain=2.0))


def test_numbers_do_not_depend_on_the_order_of_modules() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    turned = nn.ModuleDict({"b": nn.Linear(3, 3), "a": nn.Linear(3, 3)})
    for each in (model, turned):
        apply(each, select="type:Linear", name="normal_", seed=3)
        for name, parameter in each.named_parameters():
            assert torch.equal(parameter, drawn("normal_", parameter, name))
    again = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    for each in (model, again):
        apply(each, select="type:Linear", name="normal_")
    assert torch.equal(model["a"].weight, again["a"].weight)
    assert not torch.equal(model["a"].weight, model["b"].weight)


def test_a_shared_parameter_has_the_numbers_of_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    for select in ("1", "type:Linear"):
        apply(model, select=select, name="normal_", parameters="weight", seed=3)
        assert torch.equal(model[1].weight, drawn("normal_", model[0].weight, "0.weight"))
    assert model[1].weight is model[0].weight


def test_a_bias_is_kept_where_two_dimensions_are_needed() -> None:
    module = nn.Linear(3, 2)
    bias = module.bias.clone()
    build(Init(name="kaiming_normal_"))(module)
    assert torch.equal(module.bias, bias)
    build(Init(name="ones_"))(module)
    assert module.bias.eq(1).all()
    assert module.weight.eq(1).all()


def test_empty_parameters_stay_empty() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(0, 3))
    build(Init(name="xavier_uniform_"))(module)
    assert module.weight.shape == (0, 3)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"name": "xavier_uniform_", "parameters": "bias"}, r"'bias': xavier_uniform_ does not take .*\[2\]"),
        (
            {"name": "normal_", "args": {"sdt": 1.0}},
            "args: normal_: got an unexpected keyword argument 'sdt'",
        ),
        ({"name": "constant_"}, "missing a required argument: 'val'"),
        ({"name": "normal_", "args": {"generator": 1}}, "leave `generator` out"),
        ({"name": "normal_", "parameters": "wieght"}, "did you mean 'weight'"),
        (
            {"name": "xavier_uniform_", "args": {"gain": "2"}},
            "'weight': args: xavier_uniform_: can't multiply",
        ),
        ({"name": "kaiming_normal_", "args": {"mode": "fan_inn"}}, "Mode fan_inn not supported"),
        ({"name": "uniform_", "args": {"a": 2, "b": 1}}, "found from=2 > to=1"),
        ({"name": "trunc_normal_", "args": {"std": 0}}, "trunc_normal_: float division by zero"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_installed(keys: dict[str, Any], what: str) -> None:
    spec = {"hooks": {"h": {"select": "0", "hook": "apply", "action": "init", **keys}}}
    with pytest.raises(hookrun.CompileError, match=what):
        hookrun.compile(spec, nn.Sequential(nn.Linear(3, 2)))


def test_a_module_without_a_parameter_that_fits_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(
        hookrun.CompileError, match=r"init on 0: none of .* own parameters fits: weight, bias"
    ):
        apply(model, select="0", name="xavier_uniform_")


def test_only_names_of_torch_nn_init_are_taken() -> None:
    with pytest.raises(ValidationError, match="xavier_uniform_"):
        Init(name="xavier_uniform")


def test_an_added_parameter_can_be_initialised_too() -> None:
    init = {"name": "xavier_uniform_", "args": {"gain": 2.0}, "seed": 3}
    keys = {"select": "0", "hook": "apply", "action": "add_parameter", "name": "head", "init": init}
    model = nn.Sequential(nn.Linear(3, 2))
    with hookrun.hooked(model, {"h": {**keys, "shape": [5, 4]}}):
        head = model[0].head.clone()
        assert torch.equal(head, drawn("xavier_uniform_", head, "0.head", gain=2.0))
    with pytest.raises(hookrun.CompileError, match=r"xavier_uniform_ does not take a tensor of shape \[5\]"):
        hookrun.compile({"hooks": {"h": {**keys, "shape": [5]}}}, nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(hookrun.SpecError, match="give value or init"):
        hookrun.compile({"hooks": {"h": {**keys, "shape": [5, 4], "value": 1}}}, model)

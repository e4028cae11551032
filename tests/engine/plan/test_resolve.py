"""Selectors become modules, once per object; all misfits are reported together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import nn

import hookrun
from hookrun.errors import CompileError, HookError

CAPTURE = {"hook": "forward", "action": "capture"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.fc = nn.Linear(4, 2)
        self.head = self.fc  # the same module under a second name
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.h[0].weight


def plan(model: nn.Module, **hook: Any) -> hookrun.Plan:
    return hookrun.compile({"h": CAPTURE | hook}, model)


def problems(model: nn.Module, spec: dict[str, Any], **kwargs: Any) -> list[str]:
    with pytest.raises(CompileError) as caught:
        hookrun.compile(spec, model, **kwargs)
    return [str(problem) for problem in caught.value.errors]


def test_a_disabled_hook_is_not_planned() -> None:
    assert plan(Net(), select="nothing", enabled=False).hooks == ()


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ({"select": "fcc"}, "'fcc' matches no module of Net\n    did you mean 'fc'?"),
        ({"select": "type:Conv3d"}, "did you mean 'Conv2d'"),
        ({"select": "con", "hook": "grad"}, "matches no parameter of Net"),
        ({"select": "h.*", "expect": 2}, "expected 2 modules, 'h.*' matches 3: h.0, h.1, h.2"),
        ({"select": "fc", "hook": "backward", "action": "linear"}, "it goes with forward"),
        ({"select": "h", "action": "linear"}, "weight"),
        ({"select": "h", "hook": "apply", "action": "fill", "value": 1}, "on h:"),
        ({"select": "fc", "hook": "apply", "action": "freeze", "when": {"step": 3}}, "leave `when` out"),
        ({"select": "fc", "hook": "apply", "action": "freeze", "index": "0"}, "leave `index` out"),
        (
            {"select": "fc", "hook": "saved_tensors", "action": "offload", "to": "cpu", "index": "..., 0:2"},
            "index: cannot be used with offload, which packs the whole tensor\n    leave it out",
        ),
        ({"select": "fc", "hook": "grad", "action": "add_bias", "value": 1, "trainable": True}, "trainable"),
    ],
)
def test_misfits_name_the_next_step(hook: dict[str, Any], said: str) -> None:
    (problem,) = problems(Net(), {"h": CAPTURE | hook})
    assert problem.startswith("hooks.h")
    assert said in problem


def test_expect_0_allows_a_selector_without_match() -> None:
    assert plan(Net(), select="nothing", expect="0..2").hooks[0].matches == ()
    (target,) = plan(Net(), select=["nothing", "fc"], expect=">=0").hooks[0].matches
    assert target.path == "fc"


def test_misfits_of_shapes_are_reported_with_the_others() -> None:
    spec = {
        "a": CAPTURE | {"select": "x"},
        "b": CAPTURE | {"select": "y"},
        "c": {"select": "0", "hook": "forward", "action": "add_bias", "value": [1, 2, 3]},
    }
    model = nn.Sequential(nn.Linear(2, 2))
    said = problems(model, spec, example=((torch.ones(1, 2),), {}))
    assert [text.partition(":")[0] for text in said] == ["hooks.a.select", "hooks.b.select", "hooks.c"]


def test_a_gradient_hook_on_a_frozen_parameter_is_refused() -> None:
    model = Net()
    model.fc.weight.requires_grad_(False)
    grad = {"select": "fc.weight", "hook": "grad", "action": "print"}
    assert "does not require one" in problems(model, {"g": grad})[0]
    freeze = {"select": "fc", "hook": "apply", "action": "freeze"}
    spec = {"g": grad | {"select": r"re:(fc|h\.0|tied)\..*"}, "others": freeze | {"select": "conv"}}
    frozen = {"fc": "fc.weight, fc.bias", "h": "h.0.weight, h.0.bias", "tied": "h.0.weight, tied.bias"}
    for select, names in frozen.items():
        said = problems(Net(), {"f": freeze | {"select": select}, **spec})
        assert said == [f"hooks.g: print on {names}: carries no gradient: it does not require one"]


def test_hooks_find_the_parameters_that_other_hooks_will_add() -> None:
    spec = {
        "see": {"select": "fc.extra", "hook": "grad", "action": "print"},
        "fill": one_hook("fc", "apply", "fill", value=1, parameters="extra", priority=1)["h"],
        "add": {"select": "fc", "hook": "apply", "action": "add_parameter", "name": "extra", "shape": [2]},
    }
    assert hookrun.compile(spec, Net()).hooks[0].matches[0].path == "fc.extra"


@pytest.mark.parametrize(
    ("select", "filled"),
    [
        ("fc.weight", {"fc.weight"}),
        ("head.bias", {"fc.bias"}),
        (["conv", "fc.bias"], {"conv.weight", "conv.bias", "fc.bias"}),
        ("*.bias", {"conv.bias", "fc.bias", "tied.bias"}),
        ("tied.weight", {"h.0.weight"}),
        ({"path": "h[1:].weight", "type": "Linear"}, {"h.1.weight", "h.2.weight"}),
        (r"re:(fc|h\.\d)\.weight", {"fc.weight", "h.0.weight", "h.1.weight", "h.2.weight"}),
    ],
)
def test_a_parameter_on_apply_stands_for_its_module(select: Any, filled: set[str]) -> None:
    model = Net()
    spec = one_hook(select, "apply", "fill", value=7)
    with hookrun.hooked(model, spec | {"still": one_hook(select, "apply", "freeze")["h"]}):
        pass  # filling and freezing stay after the removal
    assert {name for name, each in model.named_parameters() if each.eq(7).all()} == filled
    assert {name for name, each in model.named_parameters() if not each.requires_grad} == filled


def test_mistakes_list_the_parameters_on_apply() -> None:
    apply = {"hook": "apply", "action": "freeze"}
    assert "fc (weight) (also head)" in str(plan(Net(), select="fc.weight", **apply))
    frozen = {"select": "fc.weight", **apply}
    spec = {"f": frozen, "g": {"select": "fc", "hook": "grad", "action": "print"}}
    assert problems(Net(), spec) == [
        "hooks.g: print on fc.weight: carries no gradient: it does not require one"
    ]
    (wrong,) = problems(Net(), {"f": {**frozen, "select": ["conv", "fc.wieght"]}})
    assert "'fc.wieght' (member 2 of the list) matches no module or parameter" in wrong
    assert "did you mean 'fc.weight'" in wrong
    (wrong,) = problems(Net(), {"f": {**frozen, "parameters": "bias"}})
    assert "`select` names parameters, and so does `parameters`" in wrong
    added = {"hook": "apply", "action": "add_parameter", "name": "x", "shape": [1]}
    assert "matches no module of Net" in problems(Net(), {"f": {**added, "select": "fc.weight"}})[0]


@pytest.mark.parametrize(
    "hook",
    [
        {"hook": "apply", "action": "add_parameter", "name": "logit_bias", "shape": [4]},
        {"hook": "forward", "action": "add_bias", "value": 1, "trainable": True},
    ],
    ids=["add_parameter", "add_bias"],
)
def test_an_added_parameter_never_replaces_an_attribute(hook: dict[str, Any]) -> None:
    spec = {"logit": {"select": "fc", **hook}}
    for taken in (nn.Parameter(torch.ones(2)), nn.Identity(), torch.ones(2), None):
        model = Net()
        plan = hookrun.compile(spec, model)
        model.fc.logit_bias = taken
        message = "the module has an attribute 'logit_bias' already"
        assert f"{message}: choose another name" in problems(model, spec)[0]
        with pytest.raises(HookError, match=f"'logit' .* on fc: {message}"):
            plan.install(model).__enter__()
        assert model.fc.logit_bias is taken
    other = {"select": "fc", "hook": "apply", "action": "add_parameter", "name": "logit_bias", "shape": [4]}
    assert "an earlier hook adds a parameter 'logit_bias'" in problems(Net(), {"a": other, **spec})[0]


@pytest.mark.parametrize(
    ("hook", "action"),
    [
        ("grad", {"action": "capture"}),
        ("post_accumulate_grad", {"action": "clamp", "min": -1.0}),
        ("apply", {"action": "freeze"}),
    ],
)
def test_shapes_of_lazy_parameters_are_refused_with_advice(hook: str, action: dict[str, Any]) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    spec = {"g": {"select": "0", "hook": hook, **action}}
    with pytest.raises(CompileError, match=r"hooks\.g: .*weight.* no shape yet.*run one batch") as error:
        hookrun.compile(spec, model)
    assert "0" in str(error.value)
    model(torch.ones(2, 3))
    with hookrun.hooked(model, spec):
        output = model(torch.ones(2, 3))
        assert output.shape == (2, 4)
        if output.requires_grad:
            output.sum().backward()

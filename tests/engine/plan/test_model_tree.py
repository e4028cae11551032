"""Selectors against real models: numbered parameters, classes in braces, and members of lists that match nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import nn

import hookrun
from hookrun.engine.plan.model_tree import ModelNames
from hookrun.errors import CompileError, HookrunError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.ReLU()])
        self.ps = nn.ParameterList(torch.zeros(n + 1) for n in range(11))
        self.named = nn.ParameterDict({"0": torch.zeros(1), "one": torch.zeros(1), "1": torch.zeros(1)})
        self.again = self.ps


def paths(select: Any, hook: str = "forward", **more: Any) -> list[str]:
    spec = {"h": {"select": select, "hook": hook, "action": "print"} | more}
    return [match.path for match in hookrun.compile(spec, Net()).hooks[0].matches]


def problems(select: Any, hook: str = "forward", **more: Any) -> list[str]:
    with pytest.raises(CompileError) as caught:
        paths(select, hook, **more)
    return [str(problem) for problem in caught.value.errors]


@pytest.mark.parametrize(
    ("select", "found"),
    [
        ("ps[-1]", ["ps.10"]),
        ("ps[9:]", ["ps.9", "ps.10"]),
        ("again[0]", ["ps.0"]),
        ("named[-1]", ["named.1"]),
        ("**.ps[0]", ["ps.0"]),
        ("{ps,named}[1]", ["ps.1", "named.1"]),
        ("h[0].bias", ["h.0.bias"]),
        ("h[1]", ["h.1.weight", "h.1.bias"]),
        ("h.1.[0]", []),
        ({"path": "ps.*", "exclude": "ps[1:]"}, ["ps.0"]),
    ],
)
def test_an_index_selects_numbered_parameters_on_parameter_hooks(select: Any, found: list[str]) -> None:
    assert paths(select, "grad", expect=">=0") == found


def test_an_index_does_not_select_parameters_on_module_hooks() -> None:
    assert problems("ps[-1]")[0].startswith("hooks.h.select: 'ps[-1]' matches no module of Net")


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (
            ["h.0", "h.7"],
            "hooks.h.select: 'h.7' (member 2 of the list) matches no module\n    did you mean 'h.2'",
        ),
        ([["h.0", "nosuch"]], "'nosuch' (member 2 of member 1 of the list) matches no module"),
        ({"path": ["nosuch", "h.*"]}, "'nosuch' (member 1 of `path`) matches no module"),
        (
            {"type": ["Linear", "Conv2"]},
            "'Conv2' (member 2 of `type`) matches no module\n    did you mean 'Conv2d'",
        ),
        (["h.0", {"type": ["Linear", "LSTM"]}], "'LSTM' (member 2 of `type` of member 2 of the list)"),
        (["h.0", {"path": "h.0", "type": "Conv2d"}], "'{path: h.0, type: Conv2d}' (member 2 of the list)"),
        (["h.0", "type:LSTM"], "'type:LSTM' (member 2 of the list)"),
        (["h.0", "re:h.9"], "'re:h.9' (member 2 of the list)"),
    ],
)
def test_a_member_of_a_list_that_matches_nothing_is_an_error(select: Any, said: str) -> None:
    (problem,) = problems(select)
    assert said in problem
    assert '`expect: ">=0"` lets members match nothing' in problem


def test_on_parameter_hooks_members_match_parameters() -> None:
    assert paths(["h.0", "ps.0"], "grad") == ["h.0.weight", "h.0.bias", "ps.0"]
    (problem,) = problems(["h.0.bias", "h.2"], "grad")
    assert "'h.2' (member 2 of the list) matches no parameter" in problem


def test_every_member_without_a_match_is_reported() -> None:
    said = problems(["h.0", "x", "h.1", "y"], expect=1)
    assert ["'x' (member 2" in said[0], "'y' (member 4" in said[1]] == [True, True]
    assert "expected 1 modules" in said[2]
    assert len(problems(["x", "y"])) == 2


def test_of_very_many_members_without_a_match_some_are_reported() -> None:
    assert len(problems(["h.0", *(f"x{n}" for n in range(500))])) == 20


def test_exclude_may_match_nothing() -> None:
    assert paths({"path": "h.*", "exclude": ["h.0", "nosuch"]}) == ["h.1", "h.2"]


def test_parameters_that_a_planned_hook_adds_are_found_after_it() -> None:
    model = Net()
    add = {"select": "h.0", "hook": "apply", "action": "add_parameter", "name": "extra", "shape": [2]}
    (planned,) = hookrun.compile({"add": add}, model).hooks
    names = ModelNames(model)
    assert "h.0.extra" not in names.parameter_tree().nodes
    names.plan_effects(planned.spec, planned.matches)
    assert "h.0.extra" in names.parameter_tree().nodes


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
        self.d = nn.ModuleDict({"a": nn.Linear(2, 2)})
        self.ps = nn.ParameterList([nn.Parameter(torch.zeros(2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.h, self.d["a"]):
            x = module(x)
        return x + self.ps[0]


CALLED = ["", "h.0", "h.1", "h.1.0", "d.a"]


@pytest.mark.parametrize(
    ("select", "found"),
    [
        ("**", CALLED),
        (["*", "**"], CALLED),
        (["{h,d,ps}*", "h.?"], ["h.0", "h.1"]),
        ({"min_params": 1}, CALLED),
        ({"min_params": 7}, [""]),
        ({"leaf": False}, ["", "h.1"]),
        ("type:torch.nn.modules.{linear,conv}.*", ["h.0", "h.1.0", "d.a"]),
        ({"path": "h.*", "type": "Module"}, ["h.0", "h.1"]),
        ({"path": "re:.*", "exclude": "{h*,d*,ps}"}, ["", "h.0", "h.1", "h.1.0", "d.a"]),
        ({"path": "**", "exclude": "**.h[0]"}, ["", "h.1", "h.1.0", "d.a"]),
    ],
)
@pytest.mark.parametrize("hook", ["forward", "backward", "output_grad"])
def test_globs_pass_over_containers_without_a_forward(select: Any, found: list[str], hook: str) -> None:
    spec = one_hook(select, hook, "print", expect=">=0")
    model = Containers()
    with hookrun.hooked(model, spec, strict=True) as hooks:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert {path for _, path in hooks.fired} == set(found)


def test_hooks_on_parameters_reach_containers() -> None:
    freeze = {"select": "{h,d}*", "hook": "apply", "action": "freeze"}
    clip = {"select": {"path": "*", "exclude": "{h,d}*"}, "hook": "grad", "action": "print"}
    plan = hookrun.compile({"freeze": freeze, "clip": clip}, Containers())
    assert [[match.path for match in hook.matches] for hook in plan.hooks] == [["h", "d"], ["ps.0"]]


@pytest.mark.parametrize("select", ["h", "type:ModuleList", "re:h"])
def test_a_container_that_is_named_stays_an_error(select: str) -> None:
    model = Containers()
    spec = one_hook(select, "forward", "print")
    with pytest.raises(HookrunError, match="never fired on h"), hookrun.hooked(model, spec, strict=True):
        model(torch.ones(1, 2))


def test_the_error_of_a_glob_to_containers_alone_names_them() -> None:
    spec = one_hook("d*", "forward", "print")
    with pytest.raises(
        CompileError, match="matches modules without a forward, around which no hook fires: d"
    ):
        hookrun.compile(spec, Containers())

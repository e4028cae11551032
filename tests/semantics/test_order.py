"""Hooks fire by `priority`, then in declaration order, like PyTorch hooks registered in this order, or by `prepend`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun

INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)
KINDS = [
    "forward_pre",
    "forward",
    "backward_pre",
    "backward",
    "output_grad",
    "grad",
    "post_accumulate_grad",
]
EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "double": lambda x: x * 2,
    "raise": lambda x: x + 1,
    "limit": lambda x: x.clamp(-0.5, 0.75),
}
ACTIONS: dict[str, dict[str, Any]] = {
    "double": {"action": "scale", "factor": 2},
    "raise": {"action": "add_bias", "value": 1},
    "limit": {"action": "clamp", "min": -0.5, "max": 0.75},
}
"""Three edits of which no two commute."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def results(model: nn.Module) -> list[Tensor]:
    """The output of one step, and the gradients of the input and the parameters."""
    x = INPUT.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def register(
    model: nn.Sequential, kind: str, edit: Callable[[Tensor], Tensor], prepend: bool = False
) -> None:
    """Register the same hook by hand on the middle module."""
    middle = model[1]
    match kind:
        case "forward_pre":
            middle.register_forward_pre_hook(lambda _m, args: (edit(args[0]),), prepend=prepend)
        case "forward":
            middle.register_forward_hook(lambda _m, _args, output: edit(output), prepend=prepend)
        case "backward_pre":
            middle.register_full_backward_pre_hook(lambda _m, grads: (edit(grads[0]),), prepend=prepend)
        case "backward":
            middle.register_full_backward_hook(lambda _m, grads, _out: (edit(grads[0]),), prepend=prepend)
        case "output_grad":
            middle.register_forward_hook(lambda _m, _args, output: output.register_hook(edit) and None)
        case "grad":
            middle.weight.register_hook(edit)
        case "post_accumulate_grad":

            def accumulated(parameter: Tensor) -> None:
                parameter.grad = edit(parameter.grad)  # type: ignore[arg-type]

            middle.weight.register_post_accumulate_grad_hook(accumulated)


def declared(kind: str, names: Sequence[str], **more: dict[str, Any]) -> dict[str, Any]:
    select = "1.weight" if kind in ("grad", "post_accumulate_grad") else "1"
    return {name: {"select": select, "hook": kind, **ACTIONS[name], **more.get(name, {})} for name in names}


@pytest.mark.parametrize("order", list(itertools.permutations(EDITS)))
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_fire_in_declaration_order_like_registered_hooks(kind: str, order: tuple[str, ...]) -> None:
    by_hand, model = net(), net()
    for name in order:
        register(by_hand, kind, EDITS[name])
    with hookrun.hooked(model, declared(kind, order)):
        found = results(model)
    assert_close(found, results(by_hand))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
def test_a_lower_priority_fires_first_like_prepend(kind: str) -> None:
    by_hand, model = net(), net()
    register(by_hand, kind, EDITS["double"])
    register(by_hand, kind, EDITS["raise"])
    register(by_hand, kind, EDITS["limit"], prepend=True)
    with hookrun.hooked(model, declared(kind, ["double", "raise", "limit"], limit={"priority": -1})):
        found = results(model)
    assert_close(found, results(by_hand))


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_equal_priority_fire_in_declaration_order(kind: str) -> None:
    late = {"priority": 7}
    shuffled = declared(kind, ["raise", "double", "limit"], double=late, limit=late)
    model, other = net(), net()
    with hookrun.hooked(model, shuffled):
        found = results(model)
    with hookrun.hooked(other, declared(kind, ["raise", "double", "limit"])):
        assert_close(found, results(other))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "output_grad", "grad", "post_accumulate_grad"])
def test_the_users_own_hooks_fire_in_registration_order_with_ours(kind: str) -> None:
    by_hand, model = net(), net()
    for each in ("double", "limit", "raise"):
        register(by_hand, kind, EDITS[each])
    register(model, kind, EDITS["double"])
    with hookrun.hooked(model, declared(kind, ["limit"])):
        register(model, kind, EDITS["raise"])
        found = results(model)
    assert_close(found, results(by_hand))


@pytest.mark.parametrize("number", range(3))
def test_a_capture_sees_only_the_edits_declared_before_it(number: int) -> None:
    names = ["double", "raise", "limit"]
    hooks_of = declared("forward", names)
    before = dict(itertools.islice(hooks_of.items(), number))
    seen = {"seen": {"select": "1", "hook": "forward", "action": "capture"}}
    after = dict(itertools.islice(hooks_of.items(), number, None))
    model = net()
    expected = model[1](model[0](INPUT))
    for name in names[:number]:
        expected = EDITS[name](expected)
    with hookrun.hooked(model, before | seen | after) as hooks:
        model(INPUT)
    assert_close(hooks.captures["seen"]["1"], [expected.detach()])


def test_across_modules_hooks_fire_in_the_order_of_the_calls() -> None:
    spec = {
        name: {"select": "*", "hook": kind, "action": "print"}
        for name, kind in {
            "grads": "grad", "out": "forward", "back": "backward", "first": "forward_pre", "of_out": "output_grad",
        }.items()
    }  # fmt: skip
    model, by_hand = net(), net()
    with hookrun.hooked(model, spec) as hooks:
        model(INPUT.clone().requires_grad_()).sum().backward()
    expected = list[tuple[str, str]]()
    for path, module in by_hand.named_children():
        module.register_forward_pre_hook(lambda *_, path=path: expected.append(("first", path)))
        module.register_full_backward_hook(lambda *_, path=path: expected.append(("back", path)))
        module.register_forward_hook(lambda *_, path=path: expected.append(("out", path)))
    for name, parameter in by_hand.named_parameters():
        parameter.register_hook(lambda _g, name=name: expected.append(("grads", name)))
    by_hand(INPUT.clone().requires_grad_()).sum().backward()
    found = list(dict.fromkeys((record["hook"], record["module"]) for record in hooks.records))
    assert [each for each in found if each[0] in ("first", "out")] == [
        each for each in expected if each[0] in ("first", "out")
    ]
    backwards = [path for hook, path in found if hook == "back"]
    assert backwards == [path for hook, path in expected if hook == "back"] == ["2", "1", "0"]
    assert [path for hook, path in found if hook == "of_out"] == ["2", "1", "0"]
    assert sorted(path for hook, path in found if hook == "grads") == sorted(
        path for hook, path in expected if hook == "grads"
    )


def test_the_plan_shows_the_firing_order() -> None:
    spec = declared("forward", ["double", "raise", "limit"], limit={"priority": -1}, double={"priority": 2})
    plan = hookrun.compile(spec, net())
    assert [hook.spec.name for hook in plan.hooks] == ["limit", "raise", "double"]
    lines = str(plan).splitlines()
    rows = [
        next(number for number, line in enumerate(lines) if name in line)
        for name in ("limit", "raise", "double")
    ]
    assert rows == sorted(rows)

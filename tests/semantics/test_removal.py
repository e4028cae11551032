"""Hooks fire by `priority`, then in declaration order; however a block ends, all hook dictionaries are as before."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hooking import EVERY, one_hook, register
from small_nets import Net
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookrun
import hookrun.engine.runtime.optimizers

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture
def model() -> Net:
    return net()


def test_hooks_are_removed_after_success(model: Any) -> None:
    seen = foreign(model)
    before = hooked_state(model)
    step(model)
    expected = list(seen)
    seen.clear()
    with hookrun.hooked(model, EVERY) as hooks:
        assert hooked_state(model) != before
        step(model)
        assert not hooks.inactive
    assert hooked_state(model) == before
    assert sorted(seen) == sorted(expected), "the user's own hooks fired as without hookrun"
    seen.clear()
    step(model)
    assert seen == expected


class Stop(BaseException):
    """Derived from BaseException, like KeyboardInterrupt."""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, Stop, GeneratorExit])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(7))
def test_hooks_are_removed_after_an_exception_in_any_module_call(
    call: int, after: bool, error: type[BaseException]
) -> None:
    model = net()
    foreign(model)
    before = hooked_state(model)
    numbers = itertools.count()
    handles: list[Any] = []

    def interrupt(*_: object) -> None:
        if next(numbers) == call:
            raise error("now")

    with pytest.raises(error), hookrun.hooked(model, EVERY):
        for module in model.modules():
            register = module.register_forward_hook if after else module.register_forward_pre_hook
            handles.append(register(interrupt))
        step(model)
    for handle in handles:
        handle.remove()
    assert hooked_state(model) == before
    with hookrun.hooked(model, EVERY) as hooks:  # the next installation works
        step(model)
        assert not hooks.inactive
    assert hooked_state(model) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["block.0", "block.1"])
def test_saved_tensor_hooks_go_in_any_order(where: str, error: type[BaseException]) -> None:
    """The checkpointed region and the user's block: each removes the topmost pair, which is ours."""
    model = net()

    def fail(*_: object) -> None:
        raise error("now")

    handle = model.get_submodule(where).register_forward_pre_hook(fail)
    around = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with pytest.raises(error), hookrun.hooked(model, {"saved": EVERY["saved"]}), around:
        model(X.clone().requires_grad_())
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["a", "block.0", "b"])
def test_hooks_are_removed_after_an_exception_in_the_backward(where: str, error: type[BaseException]) -> None:
    model = net()
    before = hooked_state(model)

    def fail(_grad: Tensor) -> None:
        raise error("in backward")

    handle = model.get_parameter(f"{where}.weight").register_hook(fail)
    with pytest.raises(error), hookrun.hooked(model, EVERY):
        step(model)
    handle.remove()
    assert hooked_state(model) == before
    with hookrun.hooked(model, EVERY) as hooks:
        step(model)
        assert not hooks.inactive


@pytest.mark.parametrize(
    "kind", ["forward_pre", "forward", "output_grad", "backward", "grad", "optimizer_step_pre"]
)
def test_hooks_are_removed_after_an_error_in_a_hook(kind: str) -> None:
    model = net()
    before = hooked_state(model)
    failing = {"select": "a", "hook": kind, "action": "check", "max": -1e9}
    with pytest.raises(hookrun.CheckFailed), hookrun.hooked(model, {**EVERY, "failing": failing}):
        step(model)
    assert hooked_state(model) == before


def test_an_installation_that_fails_half_way_is_removed(model: Any) -> None:
    before = hooked_state(model)
    plan = hookrun.compile(EVERY, model)
    model.b.requires_grad_(False)
    with pytest.raises(hookrun.HookrunError, match="does not require a gradient"):
        plan.install(model).__enter__()
    assert hooked_state(model) == before


def test_an_installation_can_be_entered_once(model: Any) -> None:
    installation = hookrun.hooked(model, EVERY)
    with installation, pytest.raises(hookrun.HookrunError, match="installed already"):
        installation.__enter__()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_installations_can_be_removed_in_any_order(order: tuple[int, ...]) -> None:
    model = net()
    foreign(model)
    states = [hooked_state(model)]
    plans = [
        hookrun.compile(EVERY, model),
        hookrun.compile(one_hook("a", "forward", "scale", factor=2), model),
        hookrun.compile({"h": EVERY["grad"], "s": EVERY["saved"], "b": EVERY["back"]}, model),
    ]
    stacks = [ExitStack() for _ in plans]
    installed = [stack.enter_context(plan.install(model)) for stack, plan in zip(stacks, plans, strict=True)]
    step(model)
    left = set(range(3))
    for number in order:
        stacks[number].close()
        left.discard(number)
        counts = {each: sum(installed[each].fired.values()) for each in range(3)}
        step(model)
        for each in range(3):
            assert (sum(installed[each].fired.values()) > counts[each]) == (each in left)
    assert hooked_state(model) == states[0]


def test_users_may_remove_hooks_inside_the_block(model: Any) -> None:
    seen: list[str] = []
    first = model.a.register_forward_hook(lambda *_: seen.append("first"))
    with hookrun.hooked(model, EVERY):
        model.a.register_forward_hook(lambda *_: seen.append("second"))
        first.remove()
        step(model)
    assert set(seen) == {"second"}
    assert len(model.a._forward_hooks) == 1
    seen.clear()
    step(model)
    assert seen == ["second"] * 2


@pytest.mark.parametrize("make", [lambda m: m(X).sum(), lambda m: m(X.clone().requires_grad_()).sum()])
def test_a_graph_outlives_the_block_without_hooks(model: Any, make: Callable[..., Tensor]) -> None:
    with hookrun.hooked(model, EVERY) as hooks:
        loss = make(model)
    before = dict(hooks.fired)
    loss.backward()
    assert {
        key: n - before[key] for key, n in hooks.fired.items() if key[0] != "saved" and n != before[key]
    } == {}


INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)
KINDS = ["forward_pre", "forward", "backward_pre", "backward", "output_grad", "grad", "post_accumulate_grad"]
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


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def results(model: nn.Module) -> list[Tensor]:
    """The output of one step, and the gradients of the input and the parameters."""
    x = INPUT.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def declared(kind: str, names: Sequence[str], **more: dict[str, Any]) -> dict[str, Any]:
    select = "1.weight" if kind in ("grad", "post_accumulate_grad") else "1"
    return {name: {"select": select, "hook": kind, **ACTIONS[name], **more.get(name, {})} for name in names}


@pytest.mark.parametrize("order", list(itertools.permutations(EDITS)))
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_fire_in_declaration_order_like_registered_hooks(kind: str, order: tuple[str, ...]) -> None:
    by_hand = three_layers()
    model = three_layers()
    for name in order:
        register(by_hand[1], kind, EDITS[name])
    with hookrun.hooked(model, declared(kind, order)):
        found = results(model)
    assert_close(found, results(by_hand))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
def test_a_lower_priority_fires_first_like_prepend(kind: str) -> None:
    by_hand = three_layers()
    model = three_layers()
    register(by_hand[1], kind, EDITS["double"])
    register(by_hand[1], kind, EDITS["raise"])
    register(by_hand[1], kind, EDITS["limit"], prepend=True)
    with hookrun.hooked(model, declared(kind, ["double", "raise", "limit"], limit={"priority": -1})):
        found = results(model)
    assert_close(found, results(by_hand))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "output_grad", "grad", "post_accumulate_grad"])
def test_users_hooks_fire_in_registration_order(kind: str) -> None:
    by_hand = three_layers()
    model = three_layers()
    for each in ("double", "limit", "raise"):
        register(by_hand[1], kind, EDITS[each])
    register(model[1], kind, EDITS["double"])
    with hookrun.hooked(model, declared(kind, ["limit"])):
        register(model[1], kind, EDITS["raise"])
        found = results(model)
    assert_close(found, results(by_hand))


@pytest.mark.parametrize("number", range(3))
def test_a_capture_sees_only_the_edits_declared_before_it(number: int) -> None:
    names = ["double", "raise", "limit"]
    hooks_of = declared("forward", names)
    before = dict(itertools.islice(hooks_of.items(), number))
    seen = {"seen": {"select": "1", "hook": "forward", "action": "capture"}}
    after = dict(itertools.islice(hooks_of.items(), number, None))
    model = three_layers()
    expected = model[1](model[0](INPUT))
    for name in names[:number]:
        expected = EDITS[name](expected)
    with hookrun.hooked(model, before | seen | after) as hooks:
        assert len(model[1]._forward_hooks) == 1, "one callable for all hooks of a type"
        model(INPUT)
    assert_close(hooks.captures["seen"]["1"], [expected.detach()])


def test_across_modules_hooks_fire_in_the_order_of_the_calls() -> None:
    spec = {
        name: {"select": "*", "hook": kind, "action": "print"}
        for name, kind in {
            "grads": "grad", "out": "forward", "back": "backward", "first": "forward_pre", "of_out": "output_grad",
        }.items()
    }  # fmt: skip
    model = three_layers()
    by_hand = three_layers()
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

    def of(order: list[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
        return [each for each in order if each[0] in names]

    assert of(found, "first", "out") == of(expected, "first", "out")
    assert of(found, "back") == of(expected, "back") == [("back", path) for path in "210"]
    assert of(found, "of_out") == [("of_out", path) for path in "210"]
    assert sorted(of(found, "grads")) == sorted(of(expected, "grads"))


def test_the_plan_shows_the_firing_order() -> None:
    spec = declared("forward", ["double", "raise", "limit"], limit={"priority": -1}, double={"priority": 2})
    plan = hookrun.compile(spec, three_layers())
    order = ["limit", "raise", "double"]
    assert [hook.spec.name for hook in plan.hooks] == order
    assert [word for word in str(plan).split() if word in order] == order


def test_threads_install_on_one_model_in_turn() -> None:
    model = net()
    before = hooked_state(model)

    def installed(_: int) -> int:
        with hookrun.hooked(model, EVERY) as hooks:
            return len(hooks.sites)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            sites = set(pool.map(installed, range(40)))
    finally:
        sys.setswitchinterval(interval)
    assert len(sites) == 1
    assert hooked_state(model) == before


def seven_calls(model: Any, x: Tensor) -> Tensor:
    """Of the modules and the model; one region is checkpointed."""
    x = checkpoint(model.block, model.a(x), use_reentrant=False)
    return model.b(model.a(x))  # type: ignore[no-any-return]


def hooked_state(model: nn.Module) -> list[Any]:
    """The contents of all hook dictionaries of PyTorch, and of the attributes of all modules."""
    state: list[Any] = [len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)]
    state.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
    for path, module in model.named_modules():
        state.append((path, sorted(module.__dict__)))
        state += [
            (path, name, list(value.items()))
            for name, value in sorted(module.__dict__.items())
            if "hooks" in name and isinstance(value, dict)
        ]
    for name, parameter in model.named_parameters():
        state.append((name, list((parameter._backward_hooks or {}).items())))
        state.append((name, list((parameter._post_accumulate_grad_hooks or {}).items())))
    return state


def foreign(model: Any) -> list[str]:
    """Register a user's own hooks on the same modules and parameters; returns the list of what they see."""
    seen: list[str] = []
    model.a.register_forward_hook(lambda *_: seen.append("forward"))
    model.a.register_forward_pre_hook(lambda *_: seen.append("pre"), with_kwargs=False)
    model.b.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.b.weight.register_hook(lambda _g: seen.append("grad"))
    model.a.weight.register_post_accumulate_grad_hook(lambda _p: seen.append("accumulated"))
    return seen


def net() -> Net:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    return Net(seven_calls, a=nn.Linear(4, 4), block=block, b=nn.Linear(4, 4))


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X.clone().requires_grad_()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

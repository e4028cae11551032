"""`output_grad` is the gradient of one output of one call; observers of gradients do not change other gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import hookrun

X = torch.linspace(-1, 1, 12).reshape(3, 4)
KINDS = ["output_grad", "backward", "backward_pre"]


def hook(select: str, kind: str = "output_grad", **keys: Any) -> dict[str, Any]:
    return {"h": {"select": select, "hook": kind, "action": "capture", **keys}}


def weighted(output: Tensor) -> Tensor:
    return (output * torch.arange(1.0, output.numel() + 1).reshape(output.shape)).sum()


class Written(nn.Module):
    """Applies a function to three modules: a layer, one that returns its input, and one that flattens its input."""

    def __init__(self, function: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.same = nn.Dropout(0.5).eval()
        self.flat = nn.Flatten()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def alias_written_later(m: Written, x: Tensor) -> Tensor:
    a = m.lin(x)
    y = functional.relu_(m.same(a))
    return y + a


def added_to_in_place(m: Written, x: Tensor) -> Tensor:
    result = m.same(m.lin(x))
    result += x
    return result


def shortcut(m: Written, x: Tensor) -> Tensor:
    return m.same(x) + m.lin(x)


def flattened_and_written(m: Written, x: Tensor) -> Tensor:
    a = m.lin(x)
    y = functional.relu_(m.flat(a))
    return y * 2 + a


def written_through_the_input(m: Written, x: Tensor) -> Tensor:
    a = m.lin(x)
    y = m.same(a)
    functional.relu_(a)
    return y * 2


CASES = {
    "alias": (alias_written_later, "same"),
    "added to": (added_to_in_place, "same"),
    "shortcut": (shortcut, "same"),
    "flatten": (flattened_and_written, "flat"),
    "through the input": (written_through_the_input, "same"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_later_write_through_an_alias_gives_the_same_gradients_or_is_refused(name: str, kind: str) -> None:
    function, select = CASES[name]
    model, x, y = Written(function), X.clone().requires_grad_(), X.clone().requires_grad_()
    expected = model(x)
    weighted(expected).backward()
    with hookrun.hooked(model, hook(select, kind)) as hooks:
        found = model(y)
        assert torch.equal(found, expected)
        try:
            weighted(found).backward()
        except hookrun.HookrunError as error:
            assert kind != "output_grad", "which can follow"
            assert f"on {select}: its output shares memory with its input" in str(error)
            return
    assert_close(y.grad, x.grad)
    assert hooks.fired["h", select] == 1


def test_an_output_used_before_and_after_an_in_place_write_is_refused_by_name() -> None:
    def both(m: Written, x: Tensor) -> Tensor:
        y = m.same(m.lin(x))
        before = y + 1
        return before + y.mul_(2)

    with (
        pytest.raises(hookrun.HookrunError, match=r"on same: .* used both before and after"),
        hookrun.hooked(model := Written(both), hook("same")),
    ):
        model(X).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_an_in_place_activation_before_an_in_place_module_sees_its_gradient(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Hardswish(inplace=True), nn.Dropout(0.0, inplace=True))
    seen = list[Tensor]()
    handle = model[1].register_forward_hook(lambda _m, _a, out: out.register_hook(seen.append) and None)
    weighted(model(X)).backward()
    handle.remove()
    with hookrun.hooked(model, hook("1", kind)) as hooks:
        weighted(model(X)).backward()
    found = hooks.captures["h"]["1"][0]
    assert_close(found["grad_output"] if kind == "backward" else found, seen[0])


def test_every_activation_of_a_stock_mobilenet_fires() -> None:
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(num_classes=3)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    with hookrun.hooked(model, {"h": {**hook("**")["h"], "action": "stats"}}) as hooks:
        model(images).sum().backward()
    assert set(hooks.fired.values()) == {1}


class State(nn.Module):
    """Changes the caller's dict, and may return it."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, state: dict[str, Any]) -> Any:
        state["x"] = state["x"] * 2
        state["new"] = state["x"] + 1
        del state["old"]
        return state if self.returns else state["x"] * 1


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_callers_containers_keep_their_identity(kind: str, returns: bool) -> None:
    model = State(returns)

    def run() -> tuple[dict[str, Any], Any, Tensor, Tensor]:
        x = X.clone().requires_grad_()
        kept = x * 3
        state = {"x": x * 1, "kept": kept, "old": x * 1}
        output = model(state)
        assert (output is state) == returns
        assert returns or state["kept"] is kept
        total = state["x"] + state["new"] * state["kept"] + (0 if returns else output)
        weighted(total).backward()
        return state, output, total, x.grad  # type: ignore[return-value]

    expected = run()
    with hookrun.hooked(model, hook("", kind)) as hooks:
        found = run()
    assert list(found[0]) == list(expected[0])
    assert torch.equal(found[2], expected[2])
    assert_close(found[3], expected[3])
    assert hooks.fired["h", ""] >= 1


class Parameter(nn.Module):
    """A prompt: it returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return self.prompt


@pytest.mark.parametrize("kind", ["output_grad", "backward_pre"])
def test_a_module_that_returns_its_own_parameter_sees_its_gradient(kind: str) -> None:
    model = Parameter()
    spec = {"h": {"select": "", "hook": kind, "action": "scale", "factor": 2}}
    with hookrun.hooked(model, spec):
        for _ in range(3):
            model.prompt.grad = None
            (model() + model.prompt).sum().backward()
            # 2 from the module, 1 from the direct use
            assert torch.equal(model.prompt.grad, torch.full((4,), 3.0))
    assert not model.prompt._backward_hooks


class Hidden(nn.Module):
    """Returns all hidden states; the last one is also a separate output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = list[Tensor]()
        for layer in self.layers:
            x = layer(x).tanh()
            states.append(x)
        return {"last": x, "states": tuple(states)}


def test_a_tensor_at_two_places_of_an_output_is_acted_on_once() -> None:
    torch.manual_seed(0)
    model = Hidden()

    def gradient(spec: dict[str, Any]) -> tuple[Tensor, Any]:
        x = X.clone().requires_grad_()
        with hookrun.hooked(model, spec) as hooks:
            output = model(x)
            assert output["last"] is output["states"][-1]
            weighted(output["last"]).backward()
        return x.grad, hooks  # type: ignore[return-value]

    plain, hooks = gradient(hook(""))
    assert hooks.fired["h", ""] == 1
    doubled, _ = gradient({"h": {"select": "", "hook": "output_grad", "action": "scale", "factor": 2}})
    assert torch.equal(doubled, 2 * plain)


def test_a_hidden_state_sees_the_gradient_of_its_own_use_alone() -> None:
    torch.manual_seed(0)
    model = Hidden()
    with hookrun.hooked(model, hook("", target="states[0]")) as hooks:
        output = model(X.clone().requires_grad_())
        (weighted(output["last"]) + 5 * output["states"][0].sum()).backward()
    assert torch.equal(hooks.captures["h"][""][0], torch.full((3, 4), 5.0))


@pytest.mark.parametrize("kind", ["output_grad", "backward_pre"])
def test_views_and_parts_may_be_written_in_place_later(kind: str) -> None:
    """A module's own output may be written in place, even if it is a view or a part of a tensor."""
    for cut in (
        lambda y: y[:, :2],
        lambda y: y.t(),
        lambda y: y.view(2, 6),
        lambda y: y.sum(),
        lambda y: y[1],
    ):
        torch.manual_seed(0)
        model, last = Written(lambda m, x, cut=cut: cut(m.lin(x))), list[Tensor]()  # type: ignore[misc]
        x = X.clone().requires_grad_()
        copy = model(x) * 1
        copy.register_hook(last.append)
        weighted(copy * 2).backward()
        y = X.clone().requires_grad_()
        with hookrun.hooked(model, hook("", kind)) as hooks:
            weighted(model(y).mul_(2)).backward()
        assert_close(hooks.captures["h"][""][0], last[0])
        assert_close(y.grad, x.grad)


@pytest.mark.parametrize("last", [nn.Linear(3, 3), nn.Identity(), nn.Dropout(0.0)])
@pytest.mark.parametrize("before", [False, True])
def test_an_outer_module_sees_the_gradient_before_the_inner_one(last: nn.Module, before: bool) -> None:
    """A Sequential returns the output of its last module: one tensor is the output of two modules."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), last))
    edit = {"hook": "output_grad", "action": "add_bias", "value": 1.0}
    spec: dict[str, Any] = {
        "inner": {"select": "0.1", "hook": "output_grad", "action": "scale", "factor": 10.0},
        "inner_seen": {"select": "0.1", "hook": "output_grad", "action": "capture"},
        "outer": {"select": "0", **edit},
        "outer_seen": {"select": "0", "hook": "output_grad", "action": "capture"},
    }
    if before:
        spec["shift"] = {"select": "0.1", "hook": "forward_pre", "action": "add_bias", "value": 0.5}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2, 3)).sum().backward()
    (outer,), (inner,) = hooks.captures["outer_seen"]["0"], hooks.captures["inner_seen"]["0.1"]
    assert torch.equal(outer, torch.full((2, 3), 2.0))
    assert torch.equal(inner, torch.full((2, 3), 20.0))

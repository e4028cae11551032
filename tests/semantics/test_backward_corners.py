"""Corner cases of the backward pass: the gradients are right, or an error names hook and module."""

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

Seen = dict[str, list[Any]]
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def spec(select: Any, hook: str = "backward", **keys: Any) -> dict[str, Any]:
    return {"h": {"select": select, "hook": hook, "action": "capture", **keys}}


def gradients(model: nn.Module, x: Tensor, hooks_of: dict[str, Any]) -> tuple[list[Tensor | None], Any]:
    """The gradients of the input and of every parameter with the hooks, and the installation."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with hookrun.hooked(model, hooks_of) as hooks:
        summed(model(x)).backward()
    return [x.grad, *(p.grad for p in model.parameters())], hooks


def summed(value: Any) -> Tensor:
    match value:
        case Tensor():
            return (value * torch.arange(1.0, value.numel() + 1).reshape(value.shape)).sum()
        case dict():
            return sum(map(summed, value.values()))  # type: ignore[return-value]
        case tuple() | list():
            return sum(map(summed, value))  # type: ignore[return-value]
    return torch.zeros(())


# ---- in-place operations before and after the hooked module


class InPlace(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.after = after
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.first(x)))


SUCCESSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda y: y.add_(1),
    "relu_": functional.relu_,
    "iadd": lambda y: y.__iadd__(y * 2),
    "slice": lambda y: y.index_fill_(1, torch.tensor([0]), 0.0),
    "view then mul_": lambda y: y.view(-1).mul_(2).view(3, 4),
    "dropout_": lambda y: functional.dropout(y, 0.0, inplace=True),
    "copy_": lambda y: y.copy_(y * 3),
}


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])
@pytest.mark.parametrize("name", SUCCESSORS)
def test_gradients_are_right_before_an_in_place_successor(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = InPlace(SUCCESSORS[name])
    expected, _ = gradients(model, X, {})
    found, hooks = gradients(model, X, spec("first", kind))
    assert_close(found, expected)
    assert hooks.fired["h", "first"] == 1

    kept: list[Tensor] = []  # the reference: the same gradient if the successor gets a copy
    x = X.clone().requires_grad_()
    first = model.first(x)
    first.register_hook(kept.append)
    summed(model.last(SUCCESSORS[name](first * 1))).backward()
    captured = hooks.captures["h"]["first"][0]
    assert_close(captured["grad_output"] if kind == "backward" else captured, kept[0])
    if kind == "backward":
        assert_close(captured["grad_input"], x.grad)


@pytest.mark.parametrize("action", [{"action": "capture"}, {"action": "scale", "factor": 1}])
def test_every_module_of_a_resnet18_in_training_can_be_hooked_at_once(action: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, _ = gradients(model, images, {})
    model.load_state_dict(state)
    found, hooks = gradients(model, images, {"h": {"select": "**", "hook": "backward", **action}})
    # rounding is amplified by the batch norms over two images
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()  # type: ignore[union-attr, operator]
    assert len(hooks.fired) == len(list(model.modules()))
    for (_, path), count in hooks.fired.items():
        # used twice in each block
        assert count == (2 if path.startswith("layer") and path.endswith("relu") else 1)
    if action["action"] == "capture":
        assert_close(hooks.captures["h"][""][0]["grad_input"], found[0])


class Same(nn.Module):
    """Returns its input or a view of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return {
            "itself": lambda: x,
            "twice": lambda: (x, x),
            "view": lambda: x.view(-1),
            "slice": lambda: x[:2],
        }[self.kind]()


RETURNING: dict[str, nn.Module] = {
    "Identity": nn.Identity(),
    "Dropout in eval": nn.Dropout(0.5).eval(),
    "Flatten": nn.Flatten(),
    "ReLU in place": nn.ReLU(inplace=True),
    "itself": Same("itself"),
    "the same twice": Same("twice"),
    "a view": Same("view"),
    "a slice": Same("slice"),
}


class Around(nn.Module):
    """Uses the input of the hooked module in another way too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        beside = y * 5
        return self.inner(y), beside


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])
@pytest.mark.parametrize("name", RETURNING)
def test_a_module_that_returns_its_input_sees_the_gradient_of_its_own_use(name: str, kind: str) -> None:
    """Hooks see and edit the gradient of this module's use only, not that of other uses of the input."""
    torch.manual_seed(0)
    model = Around(RETURNING[name])
    expected, _ = gradients(model, X, {})
    found, hooks = gradients(model, X, spec("inner", kind))
    assert_close(found, expected)
    assert hooks.fired["h", "inner"] >= 1
    doubled, _ = gradients(model, X, {"h": {"select": "inner", "hook": kind, "action": "scale", "factor": 2}})

    # the reference: the output of the module counts twice
    model.zero_grad()
    x = X.clone().requires_grad_()
    inner, beside = model(x)
    (2 * summed(inner) + summed(beside)).backward()
    assert_close(doubled[0], x.grad)


# ---- containers and keywords


class Many(nn.Module):
    """Takes keyword inputs, one of them without gradient; returns a dictionary with a list and None."""

    def forward(self, x: Tensor, *, factor: Tensor, index: Tensor, none: None = None) -> dict[str, Any]:
        return {"out": [x * factor, x + 1], "index": index + 1, "none": none, "unused": x * 7}


class WithMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.many = Many()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        found = self.many(y, factor=y.sigmoid(), index=torch.arange(3), none=None)
        return found["out"][0] * found["out"][1]


def test_dict_outputs_keyword_inputs_and_none_gradients_are_seen() -> None:
    torch.manual_seed(0)
    model = WithMany()
    expected, _ = gradients(model, X, {})
    found, hooks = gradients(model, X, spec("many"))
    assert_close(found, expected)
    seen = hooks.captures["h"]["many"][0]
    y = model.layer(X)
    factor = y.sigmoid()
    out = [y * factor, y + 1]
    weights = torch.arange(1.0, 13).reshape(3, 4)
    of_out = [weights * out[1], weights * out[0]]
    assert_close([each.detach() for each in of_out], seen["grad_output"]["out"])
    assert [seen["grad_output"][key] for key in ("index", "none", "unused")] == [None] * 3
    assert_close(seen["grad_input"][0], (of_out[0] * factor + of_out[1]).detach())
    assert_close(seen["grad_input"]["factor"], (of_out[0] * y).detach())
    assert [seen["grad_input"][key] for key in ("index", "none")] == [None] * 2


@pytest.mark.parametrize(("target", "position"), [("[0]", 0), ("factor", 1)])
def test_a_target_edits_one_of_several_gradients(target: str, position: int) -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, *, factor: Tensor) -> Tensor:
            return a * factor

    a, factor = X.clone().requires_grad_(), (X + 3).clone().requires_grad_()
    edit = {"h": {"select": "", "hook": "backward", "action": "scale", "factor": 10, "target": target}}
    model = Product()
    with hookrun.hooked(model, edit):
        model(a, factor=factor).sum().backward()
    expected = [factor.detach(), a.detach()]
    expected[position] = expected[position] * 10
    assert_close([a.grad, factor.grad], expected)


# ---- nothing to see


def test_an_edit_that_finds_only_a_none_gradient_is_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with hookrun.hooked(
        model, {"h": {"select": "0", "hook": "backward", "action": "scale", "factor": 2}}
    ) as hooks:
        model(X).sum().backward()  # the first module's input does not require a gradient
    assert hooks.inactive == [("h", "0", "fired and found no tensor for its action")]


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])
def test_a_module_whose_output_has_no_gradient_is_an_error_that_names_it(kind: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    message = rf"hook 'h' \({kind}, capture\) on 0: its output carries no gradient"
    with pytest.raises(hookrun.HookrunError, match=message), hookrun.hooked(model, spec("0", kind)):
        model(X)
    with pytest.raises(hookrun.CompileError, match="carries no gradient"):
        hookrun.compile(
            spec("0", kind),
            model,
            example=((X,), {}),
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])
def test_under_no_grad_gradient_hooks_do_not_fire_and_are_reported(kind: str, mode: Any) -> None:
    model = nn.Linear(4, 4)
    with hookrun.hooked(model, spec("", kind)) as hooks, mode():
        found = model(X)
    assert_close(found, model(X).detach())
    assert hooks.inactive == [("h", "", "never fired")]


# ---- several uses, several passes


def twice(kind: str, edit: dict[str, Any]) -> tuple[Tensor | None, Any]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = X.clone().requires_grad_()
    with hookrun.hooked(model, {"h": {"select": "0", "hook": kind, **edit}}) as hooks:
        summed(model(x)).backward()
    return x.grad, hooks


def test_a_module_used_twice_fires_as_pytorchs_own_hook() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    seen: list[tuple[Tensor, Tensor]] = []
    layer.register_full_backward_hook(lambda _m, into, out: seen.append((into[0], out[0])))
    x = X.clone().requires_grad_()
    summed(model(x)).backward()
    found, hooks = twice("backward", {"action": "capture"})
    assert_close(found, x.grad)
    captured = [(each["grad_input"], each["grad_output"]) for each in hooks.captures["h"]["0"]]
    assert_close(captured, seen)

    layer._backward_hooks.clear()
    layer.register_full_backward_hook(lambda _m, into, _out: (into[0] * 3,))
    x.grad = None
    summed(model(x)).backward()
    assert_close(twice("backward", {"action": "scale", "factor": 3})[0], x.grad)


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad", "grad"])
def test_a_second_backward_through_a_retained_graph_fires_again(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = X.clone().requires_grad_()
    select = "2.weight" if kind == "grad" else "2"
    with hookrun.hooked(
        model, {"h": {"select": select, "hook": kind, "action": "scale", "factor": 2}}
    ) as hooks:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
    assert_close(x.grad, 2 * first)
    assert hooks.fired["h", select] == 2


class Cubic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])
def test_double_backward_differentiates_the_edit(kind: str) -> None:
    """A gradient penalty differentiates the edited gradient, as with PyTorch's own hooks."""

    def penalty(model: nn.Module) -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.detach(), x.grad  # type: ignore[return-value]

    by_hand, model = nn.Sequential(Cubic()), nn.Sequential(Cubic())
    if kind == "backward":
        by_hand[0].register_full_backward_hook(lambda _m, into, _out: (into[0] * 3,))
    elif kind == "backward_pre":
        by_hand[0].register_full_backward_pre_hook(lambda _m, out: (out[0] * 3,))
    else:
        by_hand[0].register_forward_hook(
            lambda _m, _a, out: out.register_hook(lambda grad: grad * 3) and None
        )
    with hookrun.hooked(model, {"h": {"select": "0", "hook": kind, "action": "scale", "factor": 3}}) as hooks:
        found = penalty(model)
    assert_close(found, penalty(by_hand))
    assert_close(found[0], 9 * X**2)
    assert hooks.fired["h", "0"] >= 1


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])
def test_autograd_grad_fires_gradient_hooks(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = X.clone().requires_grad_()
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    with hookrun.hooked(model, {"h": {"select": "1", "hook": kind, "action": "scale", "factor": 2}}) as hooks:
        (found,) = torch.autograd.grad(model(x).sum(), x)
    assert_close(found, 2 * plain)
    assert hooks.fired["h", "1"] == 1


def test_a_leaf_given_as_an_input_gets_its_gradient() -> None:
    model = nn.Linear(4, 4)
    leaf = nn.Parameter(X.clone())
    with hookrun.hooked(model, {"h": {"select": "", "hook": "backward", "action": "scale", "factor": 2}}):
        model(leaf).sum().backward()
    assert_close(leaf.grad, 2 * model.weight.detach().sum(0).expand(3, 4))
    assert leaf.is_leaf


def test_an_in_place_module_writes_the_callers_tensor_as_without_hooks() -> None:
    model = nn.ReLU(inplace=True)
    x = X.clone().requires_grad_()
    y = x * 1
    with hookrun.hooked(model, spec("")):
        out = model(y)
    assert_close(y.detach(), X.relu())
    assert_close(out.detach(), X.relu())
    summed(y).backward()  # through the caller's tensor, which was written in place
    weights = torch.arange(1.0, 13).reshape(3, 4)
    assert_close(x.grad, weights * (X > 0))


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad", "grad", "post_accumulate_grad"])
def test_an_error_in_a_backward_hook_names_hook_and_module(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    on_parameter = kind in ("grad", "post_accumulate_grad")
    select = "1.weight" if on_parameter else "1"
    bad = {"h": {"select": select, "hook": kind, "action": "add_bias", "value": [1, 2, 3, 4, 5]}}
    with (
        pytest.raises(hookrun.HookrunError, match=rf"hook 'h' \({kind}, add_bias\) on {select}: .*shape"),
        hookrun.hooked(model, bad),
    ):
        model(X.clone().requires_grad_()).sum().backward()

"""Gradients of one call are right in corner cases of the backward pass, or an error names hook and module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from hooking import one_hook, register
from small_nets import Net
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import hookrun

X = torch.linspace(-1, 1, 12).reshape(3, 4)
IDS = torch.arange(6).reshape(2, 3) % 5
each_kind = pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad"])


# ---- in-place operations before and after the hooked module


SUCCESSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda y: y.add_(1),
    "relu_": functional.relu_,
    "iadd": lambda y: y.__iadd__(y * 2),
    "slice": lambda y: y.index_fill_(1, torch.tensor([0]), 0.0),
    "view then mul_": lambda y: y.view(-1).mul_(2).view(3, 4),
    "dropout_": lambda y: functional.dropout(y, 0.0, inplace=True),
    "copy_": lambda y: y.copy_(y * 3),
}


@each_kind
@pytest.mark.parametrize("name", SUCCESSORS)
def test_gradients_are_right_before_an_in_place_successor(name: str, kind: str) -> None:
    torch.manual_seed(0)
    after = SUCCESSORS[name]
    model = Net(lambda m, x: m.last(after(m.first(x))), first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    expected, _ = gradients(model, X, {})
    found, hooks = gradients(model, X, one_hook("first", kind))
    assert_close(found, expected)
    assert hooks.fired["h", "first"] == 1

    kept: list[Tensor] = []  # the reference: the same gradient if the successor gets a copy
    x = X.clone().requires_grad_()
    first = model.first(x)
    first.register_hook(kept.append)
    summed(model.last(after(first * 1))).backward()
    captured = hooks.captures["h"]["first"][0]
    assert_close(captured["grad_output"] if kind == "backward" else captured, kept[0])
    if kind == "backward":
        assert_close(captured["grad_input"], x.grad)


@pytest.mark.parametrize("action", [{"action": "capture"}, {"action": "scale", "factor": 1}])
def test_every_module_of_a_resnet18_can_be_hooked_at_once(action: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, _ = gradients(model, images, {})
    model.load_state_dict(state)
    found, hooks = gradients(model, images, one_hook("**", "backward", **action))
    # rounding is amplified by the batch norms over two images
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()  # type: ignore[union-attr, operator]
    assert len(hooks.fired) == len(list(model.modules()))
    for (_, path), count in hooks.fired.items():
        # used twice in each block
        assert count == (2 if path.startswith("layer") and path.endswith("relu") else 1)
    if action["action"] == "capture":
        assert_close(hooks.captures["h"][""][0]["grad_input"], found[0])


RETURNING: dict[str, nn.Module] = {
    "Identity": nn.Identity(),
    "Dropout in eval": nn.Dropout(0.5).eval(),
    "Flatten": nn.Flatten(),
    "ReLU in place": nn.ReLU(inplace=True),
    "itself": Net(lambda _, x: x),
    "the same twice": Net(lambda _, x: (x, x)),
    "a view": Net(lambda _, x: x.view(-1)),
    "a slice": Net(lambda _, x: x[:2]),
}


def around(model: Any, x: Tensor) -> Any:
    """Use the input of the hooked module in another way too."""
    y = model.layer(x)
    beside = y * 5
    return model.inner(y), beside


@each_kind
@pytest.mark.parametrize("name", RETURNING)
def test_a_module_sees_the_gradient_of_its_own_use(name: str, kind: str) -> None:
    """Hooks see and edit the gradient of this module's use only, not that of other uses of the input."""
    torch.manual_seed(0)
    model = Net(around, layer=nn.Linear(4, 4), inner=RETURNING[name])
    expected, _ = gradients(model, X, {})
    found, hooks = gradients(model, X, one_hook("inner", kind))
    assert_close(found, expected)
    assert hooks.fired["h", "inner"] >= 1
    doubled, _ = gradients(model, X, one_hook("inner", kind, "scale", factor=2))

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


def test_gradients_of_keyword_inputs_are_seen() -> None:
    def product(model: Any, x: Tensor) -> Tensor:
        y = model.layer(x)
        found = model.many(y, factor=y.sigmoid(), index=torch.arange(3), none=None)
        return found["out"][0] * found["out"][1]

    torch.manual_seed(0)
    model = Net(product, layer=nn.Linear(4, 4), many=Many())
    expected, _ = gradients(model, X, {})
    found, hooks = gradients(model, X, one_hook("many", "backward"))
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
    a = X.clone().requires_grad_()
    factor = (X + 3).clone().requires_grad_()
    model = Net(lambda _, a, *, factor: a * factor)
    with hookrun.hooked(model, one_hook("", "backward", "scale", factor=10, target=target)):
        model(a, factor=factor).sum().backward()
    expected = [factor.detach(), a.detach()]
    expected[position] = expected[position] * 10
    assert_close([a.grad, factor.grad], expected)


def test_a_backward_hook_sees_what_backward_pre_hooks_return() -> None:
    edit = {"pre": {"select": "", "hook": "backward_pre", "action": "scale", "factor": 3}}
    _, hooks = gradients(nn.Linear(4, 1), X, edit | one_hook("", "backward"))
    assert_close(hooks.captures["h"][""][0]["grad_output"], torch.tensor([[3.0], [6.0], [9.0]]))


# ---- nothing to see


@each_kind
def test_an_output_without_gradient_names_its_module(kind: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    message = rf"hook 'h' \({kind}, capture\) on 0: its output carries no gradient"
    with pytest.raises(hookrun.HookrunError, match=message), hookrun.hooked(model, one_hook("0", kind)):
        model(X)
    with pytest.raises(hookrun.CompileError, match="carries no gradient"):
        hookrun.compile(one_hook("0", kind), model, example=((X,), {}))
    number = Net(lambda _, x: 3)
    message = "its output is a int without tensors"
    with pytest.raises(hookrun.HookrunError, match=message), hookrun.hooked(number, one_hook("", kind)):
        number(X)


def test_the_first_module_has_no_gradient_of_its_input() -> None:
    _, hooks = gradients(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1)), IDS, one_hook("0", "backward"))
    (value,) = hooks.captures["h"]["0"]
    assert value["grad_input"] is None
    assert value["grad_output"].shape == (2, 3, 4)


def test_the_same_tensor_given_twice_has_two_gradients() -> None:
    model = Net(lambda m, x: m.b(x, x), b=nn.Bilinear(4, 4, 1, bias=False))
    (grad, *_), hooks = gradients(model, X, one_hook("b", "backward"))
    first, second = hooks.captures["h"]["b"][0]["grad_input"]
    assert_close(first + second, grad)
    assert first.any()
    assert second.any()


# ---- several uses, several passes


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad", "grad"])
def test_a_second_backward_through_a_retained_graph_fires_again(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = X.clone().requires_grad_()
    select = "2.weight" if kind == "grad" else "2"
    with hookrun.hooked(model, one_hook(select, kind, "scale", factor=2)) as hooks:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
    assert_close(x.grad, 2 * first)
    assert hooks.fired["h", select] == 2


@each_kind
def test_double_backward_differentiates_the_edit(kind: str) -> None:
    """A gradient penalty differentiates the edited gradient, as with PyTorch's own hooks."""

    def penalty(model: nn.Module) -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.detach(), x.grad  # type: ignore[return-value]

    by_hand, model = (nn.Sequential(Net(lambda _, x: x**3)) for _ in range(2))
    register(by_hand[0], kind, lambda grad: grad * 3)
    with hookrun.hooked(model, one_hook("0", kind, "scale", factor=3)) as hooks:
        found = penalty(model)
    assert_close(found, penalty(by_hand))
    assert_close(found[0], 9 * X**2)
    assert hooks.fired["h", "0"] >= 1


EDITS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "scale": ({"action": "scale", "factor": 3}, lambda grad: grad * 3),
    "clamp": ({"action": "clamp", "max": 0.5}, lambda grad: grad.clamp(max=0.5)),
    "replace": ({"action": "replace", "value": 2}, lambda grad: torch.full_like(grad, 2)),
    "clip_norm": (
        {"action": "clip_norm", "max_norm": 1},
        lambda grad: grad * (1 / (grad.norm() + 1e-6)).clamp_max(1),
    ),
    "index": ({"action": "scale", "factor": 3, "index": 0}, lambda grad: torch.cat([grad[:1] * 3, grad[1:]])),
}


@pytest.mark.filterwarnings(
    "ignore:Using backward:UserWarning"
)  # of a reference cycle, which the test breaks
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["grad", "post_accumulate_grad"])
def test_double_backward_covers_parameter_gradients(kind: str, edit: str) -> None:
    action, by_hand = EDITS[edit]

    def second(model: nn.Module) -> list[Tensor]:
        parameters = list(model.parameters())
        for _ in range(2):  # the second gradient is added to the first
            model(X).pow(3).sum().backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in parameters)  # type: ignore[union-attr]
        found = [*torch.autograd.grad(penalty, parameters), *(p.grad.detach() for p in parameters)]  # type: ignore
        model.zero_grad()  # breaks the reference cycle between the gradients and their parameters
        return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    handle = register(model[0], kind, by_hand)
    expected = second(model)
    handle.remove()
    with hookrun.hooked(model, one_hook("0.weight", kind, **action)):
        assert_close(second(model), expected)


def test_a_leaf_given_as_an_input_gets_its_gradient() -> None:
    model = nn.Linear(4, 4)
    leaf = nn.Parameter(X.clone())
    with hookrun.hooked(model, one_hook("", "backward", "scale", factor=2)):
        model(leaf).sum().backward()
    assert_close(leaf.grad, 2 * model.weight.detach().sum(0).expand(3, 4))
    assert leaf.is_leaf


def test_an_in_place_module_writes_the_caller_s_tensor() -> None:
    model = nn.ReLU(inplace=True)
    x = X.clone().requires_grad_()
    y = x * 1
    with hookrun.hooked(model, one_hook("", "backward")):
        out = model(y)
    assert_close([y.detach(), out.detach()], [X.relu()] * 2)
    summed(y).backward()  # through the caller's tensor, which was written in place
    assert_close(x.grad, torch.arange(1.0, 13).reshape(3, 4) * (X > 0))


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "output_grad", "grad", "post_accumulate_grad"])
def test_an_error_in_a_backward_hook_names_the_module(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    on_parameter = kind in ("grad", "post_accumulate_grad")
    select = "1.weight" if on_parameter else "1"
    bad = one_hook(select, kind, "add_bias", value=[1, 2, 3, 4, 5])
    said = rf"hook 'h' \({kind}, add_bias\) on {select}: .*shape"
    with pytest.raises(hookrun.HookrunError, match=said), hookrun.hooked(model, bad):
        model(X.clone().requires_grad_()).sum().backward()


# ---- the gradient of this output alone


def written(function: Callable[[Any, Tensor], Tensor]) -> Net:
    """A layer, a module that returns its input, and one that flattens its input."""
    torch.manual_seed(0)
    return Net(function, lin=nn.Linear(4, 4), same=nn.Dropout(0.5).eval(), flat=nn.Flatten())


def alias_written_later(m: Any, x: Tensor) -> Tensor:
    a = m.lin(x)
    y = functional.relu_(m.same(a))
    return y + a


def added_to_in_place(m: Any, x: Tensor) -> Tensor:
    result = m.same(m.lin(x))
    result += x
    return result


def shortcut(m: Any, x: Tensor) -> Tensor:
    return m.same(x) + m.lin(x)


def flattened_and_written(m: Any, x: Tensor) -> Tensor:
    a = m.lin(x)
    y = functional.relu_(m.flat(a))
    return y * 2 + a


def written_through_the_input(m: Any, x: Tensor) -> Tensor:
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


@each_kind
@pytest.mark.parametrize("name", CASES)
def test_a_later_write_through_an_alias_stays_correct(name: str, kind: str) -> None:
    function, select = CASES[name]
    model = written(function)
    x = X.clone().requires_grad_()
    y = X.clone().requires_grad_()
    expected = model(x)
    summed(expected).backward()
    with hookrun.hooked(model, one_hook(select, kind)) as hooks:
        found = model(y)
        assert torch.equal(found, expected)
        try:
            summed(found).backward()
        except hookrun.HookrunError as error:
            assert kind != "output_grad", "which can follow"
            assert f"on {select}: its output shares memory with its input" in str(error)
            return
    assert_close(y.grad, x.grad)
    assert hooks.fired["h", select] == 1


def test_a_write_between_two_uses_is_refused_by_name() -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        y = m.same(m.lin(x))
        return (y + 1) + y.mul_(2)

    model = written(both)
    refused = pytest.raises(hookrun.HookrunError, match=r"on same: .* used both before and after")
    with refused, hookrun.hooked(model, one_hook("same", "output_grad")):
        model(X).sum().backward()


def test_every_activation_of_a_stock_mobilenet_fires() -> None:
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(num_classes=3)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    with hookrun.hooked(model, one_hook("**", "output_grad", "stats")) as hooks:
        model(images).sum().backward()
    assert set(hooks.fired.values()) == {1}


@pytest.mark.parametrize("returns", [True, False])
@each_kind
def test_the_callers_containers_keep_their_identity(kind: str, returns: bool) -> None:
    def change(_: Any, state: dict[str, Any]) -> Any:
        state["x"] = state["x"] * 2
        state["new"] = state["x"] + 1
        del state["old"]
        return state if returns else state["x"] * 1

    model = Net(change)

    def run() -> tuple[dict[str, Any], Any, Tensor, Tensor]:
        x = X.clone().requires_grad_()
        kept = x * 3
        state = {"x": x * 1, "kept": kept, "old": x * 1}
        output = model(state)
        assert (output is state) == returns
        assert returns or state["kept"] is kept
        total = state["x"] + state["new"] * state["kept"] + (0 if returns else output)
        summed(total).backward()
        return state, output, total, x.grad  # type: ignore[return-value]

    expected = run()
    with hookrun.hooked(model, one_hook("", kind)) as hooks:
        found = run()
    assert list(found[0]) == list(expected[0])
    assert torch.equal(found[2], expected[2])
    assert_close(found[3], expected[3])
    assert hooks.fired["h", ""] >= 1


@pytest.mark.parametrize("kind", ["output_grad", "backward_pre"])
def test_a_returned_parameter_has_its_gradient(kind: str) -> None:
    model = Net(lambda m: m.prompt, prompt=nn.Parameter(torch.ones(4)))
    with hookrun.hooked(model, one_hook("", kind, "scale", factor=2)):
        for _ in range(3):
            model.prompt.grad = None
            (model() + model.prompt).sum().backward()
            # 2 from the module, 1 from the direct use
            assert torch.equal(model.prompt.grad, torch.full((4,), 3.0))
    assert not model.prompt._backward_hooks


def hidden_states(model: Any, x: Tensor) -> dict[str, Any]:
    """All hidden states; the last one is also a separate output."""
    states = list[Tensor]()
    for layer in model.layers:
        x = layer(x).tanh()
        states.append(x)
    return {"last": x, "states": tuple(states)}


def hidden() -> Net:
    torch.manual_seed(0)
    return Net(hidden_states, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))


def test_a_tensor_at_two_places_of_an_output_is_acted_on_once() -> None:
    model = hidden()

    def gradient(hook: dict[str, Any]) -> tuple[Tensor, Any]:
        x = X.clone().requires_grad_()
        with hookrun.hooked(model, hook) as hooks:
            output = model(x)
            assert output["last"] is output["states"][-1]
            summed(output["last"]).backward()
        return x.grad, hooks  # type: ignore[return-value]

    plain, hooks = gradient(one_hook("", "output_grad"))
    assert hooks.fired["h", ""] == 1
    doubled, _ = gradient(one_hook("", "output_grad", "scale", factor=2))
    assert torch.equal(doubled, 2 * plain)


def test_a_hidden_state_sees_the_gradient_of_its_own_use_alone() -> None:
    model = hidden()
    with hookrun.hooked(model, one_hook("", "output_grad", target="states[0]")) as hooks:
        output = model(X.clone().requires_grad_())
        (summed(output["last"]) + 5 * output["states"][0].sum()).backward()
    assert torch.equal(hooks.captures["h"][""][0], torch.full((3, 4), 5.0))


@pytest.mark.parametrize("kind", ["output_grad", "backward_pre"])
def test_views_may_be_written_in_place_later(kind: str) -> None:
    """A module's own output may be written in place, even if it is a view or a part of a tensor."""
    for cut in (
        lambda y: y[:, :2],
        lambda y: y.t(),
        lambda y: y.view(2, 6),
        lambda y: y.sum(),
        lambda y: y[1],
    ):
        model = written(lambda m, x, cut=cut: cut(m.lin(x)))
        last = list[Tensor]()
        x = X.clone().requires_grad_()
        copy = model(x) * 1
        copy.register_hook(last.append)
        summed(copy * 2).backward()
        y = X.clone().requires_grad_()
        with hookrun.hooked(model, one_hook("", kind)) as hooks:
            summed(model(y).mul_(2)).backward()
        assert_close(hooks.captures["h"][""][0], last[0])
        assert_close(y.grad, x.grad)


@pytest.mark.parametrize("last", [nn.Linear(3, 3), nn.Identity(), nn.Dropout(0.0)])
@pytest.mark.parametrize("before", [False, True])
def test_an_outer_module_sees_the_gradient_before_the_inner_one(last: nn.Module, before: bool) -> None:
    """A Sequential returns the output of its last module: one tensor is the output of two modules."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), last))
    hooks_of = {
        "inner": one_hook("0.1", "output_grad", "scale", factor=10.0)["h"],
        "inner_seen": one_hook("0.1", "output_grad")["h"],
        "outer": one_hook("0", "output_grad", "add_bias", value=1.0)["h"],
        "outer_seen": one_hook("0", "output_grad")["h"],
    }
    if before:
        hooks_of |= one_hook("0.1", "forward_pre", "add_bias", value=0.5)
    with hookrun.hooked(model, hooks_of) as hooks:
        model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(hooks.captures["outer_seen"]["0"][0], torch.full((2, 3), 2.0))
    assert torch.equal(hooks.captures["inner_seen"]["0.1"][0], torch.full((2, 3), 20.0))


def gradients(model: nn.Module, x: Tensor, hooks_of: dict[str, Any]) -> tuple[list[Tensor | None], Any]:
    """The gradients of the input and of every parameter with the hooks, and the installation."""
    model.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    with hookrun.hooked(model, hooks_of) as hooks:
        summed(model(x)).backward()
    return [x.grad, *(p.grad for p in model.parameters())], hooks


def summed(value: Any) -> Tensor:
    """The sum of all elements of a value, each with another weight."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(
        ((x * torch.arange(1.0, x.numel() + 1).reshape(x.shape)).sum() for x in tensors), torch.zeros(())
    )

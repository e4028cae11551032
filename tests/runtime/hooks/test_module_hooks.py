"""Each hook type sees and edits what PyTorch's own hook would: values compared with those of hand-written hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookError
from hookrun.runtime.hooks.exits import Watched, takes_nodes

# These set-ups contain hooks that do nothing; tests/semantics/test_never_fired.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")


class Returns(nn.Module):
    """Puts x * w into a container."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(x * self.w)


class Keywords(nn.Module):
    def forward(self, x: Tensor, *, y: Tensor, flag: bool = False) -> Tensor:
        return x * y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.act = nn.ReLU(inplace=True)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 15).reshape(5, 3)


def hooked(model: nn.Module, **hook: Any) -> Any:
    return hookrun.hooked(model, {"h": hook})


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_forward_edits_the_output() -> None:
    model = net()
    reference = net()
    reference.a.register_forward_hook(lambda module, args, output: output * 3)
    with hooked(model, select="a", hook="forward", action="scale", factor=3):
        assert torch.equal(model(X), reference(X))
    assert torch.equal(model(X), net()(X))


def test_forward_pre_edits_the_arguments_and_not_the_callers_tensor() -> None:
    model, reference, x = net(), net(), X.clone()
    reference.a.register_forward_pre_hook(lambda module, args: args[0] * 3)
    with hooked(model, select="a", hook="forward_pre", action="scale", factor=3):
        assert torch.equal(model(x), reference(X))
    assert torch.equal(x, X)


def test_forward_pre_captures_one_argument_bare_and_several_together() -> None:
    model = nn.ModuleDict({"k": Keywords(), "l": nn.Linear(2, 2)})
    with hooked(model, select="*", hook="forward_pre", action="capture") as hooks:
        model["l"](torch.ones(1, 2))
        model["k"](torch.ones(1), y=torch.zeros(1))
    assert torch.equal(hooks.captures["h"]["l"][0], torch.ones(1, 2))
    assert set(hooks.captures["h"]["k"][0]) == {0, "y"}


def pack(t: Tensor) -> dict[str, Any]:
    return {"a": t, "b": [t + 1]}


def test_a_missing_target_is_an_error_that_names_hook_module_and_the_present_ones() -> None:
    model = nn.Sequential(Returns(pack))
    with (
        hooked(model, select="0", hook="forward", action="scale", factor=1, target="c"),
        pytest.raises(
            HookError, match=r"hook 'h' \(forward, scale\) on 0: target c: 'c' is not in the dict: .*a, b"
        ),
    ):
        model[0](X)


def test_an_index_edits_that_part_only() -> None:
    model = net()
    plain = model(X)
    with hooked(model, select="b", hook="forward", action="replace", value=7, index=":, 0"):
        edited = model(X)
    assert torch.equal(edited[:, 0], torch.full((5,), 7.0))
    assert torch.equal(edited[:, 1], plain[:, 1])


def test_grad_is_a_tensor_hook_on_the_parameter() -> None:
    model, reference = net(), net()
    reference.a.weight.register_hook(lambda grad: grad * 2)
    with hooked(model, select="a.weight", hook="grad", action="scale", factor=2):
        found = gradients(model)
    assert all(torch.equal(found[name], grad) for name, grad in gradients(reference).items())
    assert torch.equal(gradients(model)["a.weight"], gradients(net())["a.weight"])


def test_post_accumulate_grad_acts_on_what_has_accumulated_once() -> None:
    model = net()
    whole = gradients(model)["b.weight"]
    model.zero_grad()
    with hooked(model, select="b.weight", hook="post_accumulate_grad", action="scale", factor=0.5) as hooks:
        for number in range(4):
            hooks.accumulating = number < 3
            (model(X).square().sum() / 4).backward()
    torch.testing.assert_close(model.b.weight.grad, whole * 0.5)
    assert hooks.fired["h", "b.weight"] == 1


def test_output_grad_sees_the_gradient_of_the_output_after_all_edits() -> None:
    model, reference = net(), net()
    seen = []
    reference.b.register_forward_hook(lambda module, args, output: output * 3)
    reference.b.register_forward_hook(lambda module, args, output: output.register_hook(seen.append) and None)
    spec = {
        "see": {"select": "b", "hook": "output_grad", "action": "capture"},
        "edit": {"select": "b", "hook": "forward", "action": "scale", "factor": 3},
    }
    gradients(reference)
    with hookrun.hooked(model, spec) as hooks:
        gradients(model)
    assert torch.equal(hooks.captures["see"]["b"][0], seen[0])


def test_output_grad_edits_before_the_modules_own_backward() -> None:
    model, reference = net(), net()
    reference.a.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: grad * 2) and None
    )
    with hooked(model, select="a", hook="output_grad", action="scale", factor=2):
        found = gradients(model)
    assert all(torch.equal(found[name], grad) for name, grad in gradients(reference).items())


def test_output_grad_on_a_container_fires_for_each_tensor_with_its_path(capsys) -> None:
    model = nn.Sequential(Returns(pack))
    with hooked(model, select="0", hook="output_grad", action="print") as hooks:
        out = model[0](torch.ones(2))
        (out["a"].sum() + 2 * out["b"][0].sum()).backward()
    assert sorted(record["path"] for record in hooks.records) == ["a", "b[0]"]
    assert hooks.fired["h", "0"] == 2
    assert "h  0 a  shape=[2]" in capsys.readouterr().out


@pytest.mark.parametrize("layer", [nn.MaxPool1d(2), nn.AvgPool1d(2), nn.Flatten(), nn.InstanceNorm1d(2)])
def test_output_grad_of_a_layer_that_returns_a_view_is_right_after_an_in_place_write(
    layer: nn.Module,
) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), layer, nn.ReLU(inplace=True))
    spec = {"z": {"select": "1", "hook": "output_grad", "action": "scale", "factor": 0.0}}
    with hookrun.hooked(model, spec):
        model(torch.randn(4, 1, 8)).square().sum().backward()
    weight = model[0].weight
    assert isinstance(weight, Tensor) and weight.grad is not None and not weight.grad.any()


def test_several_hooks_on_one_module_run_in_order_as_one_registered_callable() -> None:
    model = net()
    spec: dict[str, Any] = {
        "double": {"select": "b", "hook": "forward", "action": "scale", "factor": 2},
        "see": {"select": "b", "hook": "forward", "action": "capture"},
        "add": {"select": "b", "hook": "forward", "action": "add_bias", "value": 1},
        "first": {"select": "b", "hook": "forward", "action": "capture", "priority": -1},
    }
    plain = model(X)
    with hookrun.hooked(model, spec) as hooks:
        assert len(model.b._forward_hooks) == 1
        out = model(X)
    assert torch.equal(hooks.captures["first"]["b"][0], plain)
    assert torch.equal(hooks.captures["see"]["b"][0], plain * 2)
    torch.testing.assert_close(out, plain * 2 + 1)


def test_an_impossible_action_is_an_error_that_names_hook_and_module() -> None:
    model = net()
    with (
        hooked(model, select="b", hook="forward", action="add_bias", value=[1, 2, 3]),
        pytest.raises(HookError, match=r"hook 'h' \(forward, add_bias\) on b: .*\[3\].*\[5, 2\]"),
    ):
        model(X)


def test_only_uses_after_the_exit_go_through_the_hooks() -> None:
    for views in (None, []):
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        new = Watched("here", [lambda grad: grad * 10]).attach(y, views)
        assert (new is y) is (views is None) and torch.equal(new, y)
        (new.sum() + (3 * y.sum() if views is not None else 0)).backward()
        assert x.grad is not None and x.grad.tolist() == [10 + 3 * (views is not None)] * 2, views


def test_leaves_and_parts_of_them_get_no_nodes() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert not takes_nodes(leaf) and not takes_nodes(leaf[:1]) and not takes_nodes(torch.ones(1))
    assert takes_nodes(leaf * 1) and takes_nodes((leaf * 1)[:1])
    assert not any(takes_nodes(each) for each in (leaf * 1).unbind())

"""`saved_tensors` returns what autograd saved; optimizer hooks act around `step()` on the selected parameters."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from hooking import one_hook
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookError

# These set-ups contain hooks that do nothing; tests/semantics/test_never_fired.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")

X = torch.linspace(-1, 1, 40).reshape(10, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.Linear(8, 1)
    )


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(X).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def saved(model: nn.Module, **hook: Any) -> Any:
    return hookrun.hooked(model, one_hook("**", "saved_tensors", **hook))


def test_nested_modules_all_see_what_is_saved_inside_them() -> None:
    with hookrun.hooked(model := net(), one_hook(["2", "2.1"], "saved_tensors")) as hooks:
        gradients(model)
    outer, (of_sigmoid,) = (hooks.captures["h"][path] for path in ("2", "2.1"))
    assert len(outer) == 2
    assert any(torch.equal(of_sigmoid, tensor) for tensor in outer)


class OnThreadOfAccelerator(nn.Module):
    """Computes on another thread with torch's saved-tensor hooks of this one, as a backward inside a forward does."""

    def forward(self, x: Tensor) -> Tensor:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        results = list[Tensor]()

        def compute() -> None:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                results.append(x.sigmoid())

        thread = Thread(target=compute)
        thread.start()
        thread.join()
        return results[0]


def test_what_another_thread_saves_for_the_call_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), OnThreadOfAccelerator())
    with saved(model, action="capture") as hooks:
        output = model(X)
    for path in ("", "1"):
        assert torch.equal(hooks.captures["h"][path][-1], output)


@pytest.mark.parametrize("parameters", [False, True])
def test_parameters_are_seen_only_on_request(parameters: bool) -> None:
    model = net()
    with saved(model, action="capture", parameters=parameters) as hooks:
        gradients(model)
    weight = model[3].weight
    assert (
        any(tensor.shape in (weight.shape, weight.T.shape) for tensor in hooks.captures["h"]["3"])
        == parameters
    )


def masking() -> nn.Sequential:
    """A network whose forward saves indices, int64, for its backward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.MaxPool1d(2), nn.Linear(4, 1))


def test_saved_integers_are_offloaded_too(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    by_hand = []
    plain = gradients(masking())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: by_hand.append(tensor) or tensor, lambda x: x
    ):
        masking()[1](torch.ones(10, 8, requires_grad=True))
    assert torch.int64 in {tensor.dtype for tensor in by_hand}

    model = masking()
    spec = {
        "saved": {"select": "1", "hook": "saved_tensors", "action": "stats", "of": ["bytes"]},
        "cast": {"select": "1", "hook": "saved_tensors", "action": "cast", "dtype": "bfloat16"},
        "offload": {"select": "1", "hook": "saved_tensors", "action": "offload", "to": "disk"},
        "left": {"select": "1", "hook": "saved_tensors", "action": "stats", "of": ["bytes"]},
    }
    with hookrun.hooked(model, spec) as hooks:
        loss = model(X).square().sum()
        held = [record["bytes"] for record in hooks.records if record["hook"] == "saved"]
        assert held == [tensor.nbytes for tensor in by_hand]
        assert len(list(tmp_path.iterdir())) == len(by_hand)
        loss.backward()
    assert hooks.fired["left", "1"] == 0
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0.05, atol=0.02)


def test_writing_into_a_saved_tensor_stays_an_error() -> None:
    model = nn.Sequential(nn.Sigmoid())
    with saved(model, action="stats", of=["bytes"]):
        out = model(torch.ones(3, requires_grad=True))
        out.add_(1)
        with pytest.raises(HookError, match="modified in place"):
            out.sum().backward()


def stepped(model: nn.Module, spec: dict[str, Any], only: list[nn.Parameter] | None = None) -> Any:
    optimizer = torch.optim.SGD(only or model.parameters(), lr=1.0)
    with hookrun.hooked(model, spec) as hooks:
        gradients(model)
        optimizer.step()
    return hooks


def test_after_the_step_the_parameters_are_edited() -> None:
    model = net()
    stepped(model, one_hook("**", "optimizer_step_post", "clamp", min=-0.01, max=0.01))
    assert max(parameter.abs().max().item() for parameter in model.parameters()) == pytest.approx(0.01)
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert parameter.is_leaf


def test_hooks_do_not_act_on_the_optimizers_of_other_models() -> None:
    model = net()
    other = net()
    gradients(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    with hookrun.hooked(model, one_hook("**", "optimizer_step_pre", "scale", factor=0)) as hooks:
        optimizer.step()
    assert set(hooks.fired.values()) == {0}
    assert hooks.clock.step == 0
    assert other[0].weight.grad.abs().sum() > 0


def test_each_optimizer_sees_its_own_parameters() -> None:
    model = net()
    hooks = stepped(model, one_hook("**", "optimizer_step_pre"), only=[model[3].weight])
    assert {path for (_, path), count in hooks.fired.items() if count} == {"3.weight"}


def test_a_parameter_without_a_gradient_is_reported() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    spec = one_hook("3.weight", "optimizer_step_pre", "scale", factor=2)
    with hookrun.hooked(model, spec) as hooks:
        optimizer.step()
    assert hooks.inactive == [("h", "3.weight", "fired and found no tensor for its action")]

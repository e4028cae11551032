"""The state of a call belongs to that call, with interruptions inside the block, recursion and several threads."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookrun

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Stops(nn.Module):
    """Raises once, after it has saved a tensor."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return y


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_saved_tensors_are_hooked_only_until_the_forward_ends_or_raises(error: type[BaseException]) -> None:
    model = nn.Sequential(nn.Tanh(), Stops(error))
    spec = {"h": {"select": ["", "1"], "hook": "saved_tensors", "action": "capture"}}
    x = X.clone().requires_grad_()
    with hookrun.hooked(model, spec) as hooks:
        with pytest.raises(error):
            model(x)
        before = dict(hooks.fired)
        (x.sigmoid() * x.exp()).sum().backward()  # outside module calls
        assert dict(hooks.fired) == before
        model(x).sum().backward()
        assert {key: n - before[key] for key, n in hooks.fired.items()} == {("h", ""): 2, ("h", "1"): 1}
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_users_saved_tensors_hooks_end_with_an_interrupted_forward() -> None:
    model, packed = Stops(KeyboardInterrupt), list[Tensor]()
    spec = {"h": {"select": "", "hook": "saved_tensors", "action": "capture"}}
    x = X.clone().requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with hookrun.hooked(model, spec):
        with pytest.raises(KeyboardInterrupt), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x)
        packed.clear()
        model(x).sum().backward()
        x.exp()
        assert packed == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("kind", ["backward", "output_grad"])
def test_gradient_hooks_are_right_after_an_interrupted_forward(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stops(KeyboardInterrupt))
    with hookrun.hooked(model, {"h": {"select": "**", "hook": kind, "action": "capture"}}) as hooks:
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model(X).sum().backward()
    assert set(hooks.fired.values()) == {1}


class Recursive(nn.Module):
    """Calls itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.layer(x)
        return self(x, depth - 1) * (depth + 1) if depth else x


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "output_grad", "backward_pre"])
@pytest.mark.parametrize("inside", [True, False])
def test_calls_of_a_recursive_module_are_numbered_separately(kind: str, inside: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Recursive()) if inside else Recursive()
    select = "0" if inside else ""
    spec = {
        f"call_{n}": {"select": select, "hook": kind, "action": "capture", "when": {"call": n}}
        for n in range(3)
    }
    spec["all"] = {"select": select, "hook": kind, "action": "capture"}
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(2):  # numbers start at 0 in each forward
            model(X.clone().requires_grad_()).sum().backward()
    assert [hooks.fired[f"call_{n}", select] for n in range(3)] == [2, 2, 2]
    captured = [hooks.captures[f"call_{n}"][select][0] for n in range(3)]
    captured = [each[0] if isinstance(each, tuple) else each for each in captured]
    everything = [each[0] if isinstance(each, tuple) else each for each in hooks.captures["all"][select][:3]]
    outwards = kind == "forward"  # the innermost call returns first
    assert_close(captured, everything[::-1] if outwards else everything)
    assert len({each.sum().item() for each in captured}) == 3


def test_two_threads_can_use_one_hooked_model() -> None:
    """Each backward pass sees the gradients of its own forward, regardless of other threads."""
    torch.manual_seed(0)
    meeting = threading.Barrier(2, timeout=60)

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meeting.wait()
            y = x * x
            meeting.wait()
            return y

    model = nn.Sequential(nn.Linear(4, 4), Meets())
    spec: dict[str, Any] = {
        "back": {"select": "1", "hook": "backward", "action": "capture", "when": {"call": 0}},
        "out": {"select": "1", "hook": "output_grad", "action": "capture"},
        "saved": {"select": "1", "hook": "saved_tensors", "action": "stats", "of": ["bytes"]},
        "noise": {"select": "0", "hook": "forward", "action": "noise", "std": 0.1},
    }
    errors = list[BaseException]()

    def run(factor: float) -> None:
        try:
            for _ in range(10):
                (model(X * factor) * factor).sum().backward()
        except BaseException as error:  # shown by the assertion below
            errors.append(error)
            meeting.abort()

    with hookrun.hooked(model, spec) as hooks:
        threads = [threading.Thread(target=run, args=(factor,)) for factor in (1.0, 100.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
    assert {key: n for key, n in hooks.fired.items()} == {
        ("back", "1"): 20, ("out", "1"): 20, ("saved", "1"): 40, ("noise", "0"): 20
    }  # fmt: skip
    for seen in hooks.captures["back"]["1"]:
        factor = seen["grad_output"].flatten()[0].item()
        assert factor in (1.0, 100.0)
        largest = seen["grad_input"].abs().max().item()
        assert (largest > 1000) == (factor == 100.0), "2 x times the gradient of the same call"


# ---- the user's own hooks on saved tensors


def test_a_users_saved_tensors_hooks_act_after_ours() -> None:
    model, events = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), list[str]()

    def pack(tensor: Tensor) -> Tensor:
        events.append("pack")
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        events.append("unpack")
        return tensor

    def run(spec: dict[str, Any]) -> tuple[Tensor, list[str], Any]:
        events.clear()
        x = X.clone().requires_grad_()
        with hookrun.hooked(model, spec) as hooks, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            model(x).sum().backward()
        return x.grad, list(events), hooks  # type: ignore[return-value]

    plain = run({})
    for more in (
        {"action": "capture"},
        {"action": "offload", "to": "cpu"},
        {"action": "offload", "to": "disk"},
    ):
        found = run({"h": {"select": ["", "*"], "hook": "saved_tensors", **more}})
        assert torch.equal(found[0], plain[0])
        assert found[1] == plain[1] != []
        assert found[2].fired["h", ""] == 2


@pytest.mark.parametrize("early", [True, False])
def test_an_observer_keeps_the_memory_savings_of_activation_checkpointing(early: bool) -> None:
    def alive(spec: dict[str, Any]) -> int:
        """The number of activations that still exist after the forward."""
        block = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(6)))
        activations = list[weakref.ref[Any]]()

        def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
            activations.append(weakref.ref(output.untyped_storage()))

        for layer in block:
            assert isinstance(layer, nn.Sequential)
            layer[1].register_forward_hook(keep)
        x = X.clone().requires_grad_()
        with hookrun.hooked(block, spec), set_checkpoint_early_stop(early):
            output = checkpoint(block, x, use_reentrant=False)
            found = sum(each() is not None for each in activations)
            output.sum().backward()
        assert x.grad is not None
        return found

    observed = {"h": {"select": "**", "hook": "saved_tensors", "action": "stats", "of": ["bytes"]}}
    assert alive(observed) == alive({}) <= 1

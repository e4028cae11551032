"""`hookrun.testing`: one call under hooks, the tiny model and the tiny run, as users' own tests use them."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import rich.style  # noqa: F401 - draws from Python's generator when it is imported
import torch
from small_nets import Net
from torch import Tensor, nn

import hookrun
from hookrun.store.verify import verify
from hookrun.testing import records, tiny_model, tiny_run

CAPTURE = {"select": "fc1", "hook": "forward", "action": "capture"}


@pytest.fixture
def _generators_untouched() -> Iterator[None]:
    before = random.getstate(), torch.get_rng_state(), repr(np.random.get_state())
    yield
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert repr(np.random.get_state()) == before[2]


def halved(x: Tensor, by: float) -> Tensor:
    return x / by


def registered(model: nn.Module) -> list[Any]:
    found = []
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks"):
                found += hooks
    return found


def test_an_own_function_is_called_with_the_value_of_its_module() -> None:
    model = tiny_model()
    x = torch.ones(2, 4)
    half = {**CAPTURE, "action": "python", "function": halved, "args": {"by": 2.0}}
    call = records(model, {"half": half, "seen": CAPTURE}, x)
    assert torch.equal(call.captures["seen"]["fc1"][0], model.fc1(x) / 2)
    assert torch.equal(call.output, model.fc2(torch.relu(model.fc1(x) / 2)))
    assert call.fired == {("half", "fc1"): 1, ("seen", "fc1"): 1}
    assert call.records == []
    with pytest.raises(FrozenInstanceError):
        call.output = None  # type: ignore[misc]


def test_an_own_function_is_called_once_for_each_firing() -> None:
    values = list[Tensor]()
    records(
        tiny_model(), {"spy": {**CAPTURE, "action": "python", "function": values.append}}, torch.ones(2, 4)
    )
    assert [type(value) for value in values] == [Tensor]
    assert values[0].shape == (2, 8)


def test_hooks_on_gradients_see_a_backward_pass_from_the_sum() -> None:
    model = tiny_model()
    x = torch.ones(2, 4)
    stats = {"select": "fc2", "hook": "output_grad", "action": "stats"}
    clip = {"select": "fc1.weight", "hook": "grad", "action": "clamp", "max": 0.0}
    call = records(model, {"gradients": stats, "clip": clip}, x)
    assert [(record["module"], record["mean"]) for record in call.records] == [("fc2", 1.0)]
    assert call.fired["clip", "fc1.weight"] == 1
    assert model.fc1.weight.grad.max() == 0
    expected = tiny_model()
    expected(x).sum().backward()
    assert torch.equal(model.fc1.weight.grad, expected.fc1.weight.grad.clamp(max=0.0))
    assert torch.equal(model.fc2.weight.grad, expected.fc2.weight.grad)


def test_hooks_on_activations_alone_leave_no_gradients() -> None:
    model = tiny_model()
    records(model, {"seen": CAPTURE}, torch.ones(2, 4))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


def test_outputs_in_containers_are_taken() -> None:
    x = torch.ones(2, requires_grad=True)
    gradients = {"select": "fc", "hook": "output_grad", "action": "capture"}

    def named(net: Any, *, model: Tensor, hooks: Tensor) -> dict[str, Tensor]:
        return {"scores": net.fc(model) * 3, "count": hooks}

    call = records(Net(named, fc=nn.Identity()), {"gradients": gradients}, model=x, hooks=torch.arange(2))
    assert call.captures["gradients"]["fc"][0].tolist() == [3.0, 3.0]
    assert list(call.output) == ["scores", "count"]


@pytest.mark.parametrize(
    ("change", "error", "where"),
    [
        ({"select": "fc9"}, hookrun.CompileError, "hooks.seen.select"),
        ({"hook": "froward"}, hookrun.SpecError, "hooks.seen.hook"),
        ({"action": "check", "max": -100.0, "policy": "error"}, hookrun.CheckFailed, "fc1"),
        ({"action": "python", "function": lambda x: x[:, :1] @ x}, hookrun.HookError, r"'seen' .* on fc1"),
    ],
)
def test_a_wrong_hook_leaves_no_hooks(change: dict[str, Any], error: type[Exception], where: str) -> None:
    model = tiny_model()
    with pytest.raises(error, match=where):
        records(model, {"seen": {**CAPTURE, **change}}, torch.ones(2, 4))
    assert registered(model) == []


def test_a_hook_that_did_nothing_is_a_warning() -> None:
    model = tiny_model()
    with pytest.warns(hookrun.HookrunWarning, match="seen never fired on fc1"):
        call = records(model, {"seen": {**CAPTURE, "when": {"step": 5}}}, torch.ones(2, 4))
    assert call.fired == {("seen", "fc1"): 0}
    assert registered(model) == []


def test_a_backward_pass_without_a_gradient_is_a_warning() -> None:
    with torch.no_grad(), pytest.warns(hookrun.HookrunWarning, match="gradients never fired on fc2"):
        records(
            tiny_model(),
            {"gradients": {"select": "fc2", "hook": "output_grad", "action": "stats"}},
            torch.ones(2, 4),
        )


@pytest.mark.usefixtures("_generators_untouched")
def test_tiny_models_are_trained_on_their_own() -> None:
    model = tiny_model()
    other = tiny_model()
    assert [name for name, _ in model.named_children()] == ["fc1", "relu1", "fc2"]
    assert model(torch.ones(5, 4)).shape == (5, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert one.requires_grad
        assert one.std() > 0
        assert one.data_ptr() != two.data_ptr()


@pytest.mark.usefixtures("_generators_untouched")
def test_a_tiny_run_has_what_runs_have(tmp_path, capsys) -> None:
    folder = tmp_path / "it's a run, [1=2]"
    run = tiny_run(folder)
    assert run.path == folder
    assert run.status["status"] == "done"
    assert verify(folder).bad == []
    assert run.captures["features"]["layers"][:].shape[1:] == (64,)
    assert {record["module"] for record in run.stats} == {"fc"}
    assert run.config["seed"] == 0
    assert [line["epoch"] for line in run.metrics if line["split"] == "val"] == [0, 1]
    assert (folder / "checkpoints/best.safetensors").exists()
    assert (folder / "report.html").exists()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(hookrun.HookrunError, match=r"(?s)exit code 2.*already holds a run"):
        tiny_run(folder)


def test_the_module_is_reached_through_the_package() -> None:
    program = "import sys, hookrun; assert 'torch' not in sys.modules; print(hookrun.testing.tiny_model()[0])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "in_features=4" in done.stdout
    assert done.stderr == ""

"""TorchScript models: hooks on their calls as a whole are those of the plain model; inside they are refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_nets import Net
from torch import Tensor, nn

import hookrun

pytestmark = [
    # of torch 2.13 and later, which deprecate TorchScript
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # torch's own reading of fake tensors, which it silences outside of the script's interpreter only
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def scripted(model: nn.Module) -> Any:
    return torch.jit.script(model)


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, X)


def loaded(model: nn.Module) -> Any:
    """The model after it was saved to a file and read from it."""
    file = io.BytesIO()
    torch.jit.save(scripted(model), file)
    file.seek(0)
    return torch.jit.load(file)


MAKERS = pytest.mark.parametrize("make", [scripted, traced, loaded])


HOOKS: dict[str, dict[str, Any]] = {
    "forward": {"action": "scale", "factor": 3, "when": {"call": 0}},
    "forward_pre": {"action": "noise", "std": 0.5},
    "backward": {"action": "scale", "factor": 3},
    "backward_pre": {"action": "scale", "factor": 3},
    "output_grad": {"action": "capture"},
    "saved_tensors": {"action": "cast", "dtype": "bfloat16"},
}


@MAKERS
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_the_whole_model_are_those_of_the_plain_one(kind: str, make: Callable[..., Any]) -> None:
    hook = {"select": "", "hook": kind, **HOOKS[kind]}
    wanted = results(Plain(), hook)
    found = results(make(Plain().train()), hook)
    assert len(wanted) == len(found)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("make", [scripted, traced])
def test_a_recorded_loop_has_a_row_for_each_sample(make: Callable[..., Any], tmp_path: Path) -> None:
    model = make(Plain().eval())
    spec = {"h": {"select": "", "hook": "forward", "action": "capture"}}
    with hookrun.record(model, spec, tmp_path / "run") as hooks, torch.no_grad():
        hooks.samples = [7, 8, 9, 11]
        expected = model(X)
    found = hookrun.open_run(tmp_path / "run").captures["h"][""]
    torch.testing.assert_close(found[:], expected)
    assert found.sample_ids.tolist() == [7, 8, 9, 11]


@pytest.mark.parametrize("path", ["body", "head"])
def test_in_a_mixed_model_what_python_calls_is_hooked(path: str) -> None:
    model = mixed()
    plain = mixed()
    with hookrun.hooked(model, {"h": {"select": path, "hook": "forward", "action": "scale", "factor": 3}}):
        hook = nn.Module.register_forward_hook(
            plain.get_submodule(path), lambda module, args, output: 3 * output
        )
        assert torch.equal(model(X), plain(X))
        hook.remove()
    assert torch.equal(model(X), plain(X)), "no hook is left"


@MAKERS
def test_a_module_inside_a_scripted_one_is_refused(make: Callable[..., Any]) -> None:
    hook = {"select": "net.0", "hook": "forward", "action": "capture"}
    with pytest.raises(hookrun.CompileError) as raised:
        hookrun.compile({"h": hook}, make(Plain()))
    assert "h.select: matches net.0; Plain (TorchScript) calls its modules without Python hooks" in str(
        raised.value
    )
    assert "hook it as a whole, or hook the model that it was made from" in str(raised.value)
    with pytest.raises(
        hookrun.CompileError, match=r"matches body\.0; body: Sequential \(TorchScript\) calls"
    ):
        hookrun.compile({"h": {**hook, "select": ["body.0", "head"]}}, mixed())


OWN: dict[str, dict[str, Any]] = {
    "grad": {"select": "head.weight", "hook": "grad", "action": "scale", "factor": 3},
    "optimizer": {"select": "**", "hook": "optimizer_step_pre", "action": "scale", "factor": 3},
    "weight": {"select": "gain", "hook": "weight", "action": "scale", "factor": 3},
    "apply": {"select": "head", "hook": "apply", "action": "freeze"},
    "bias": {"select": "", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True},
    "skip": {"select": "", "hook": "forward", "action": "skip"},
    "own": {"select": "", "hook": "forward", "action": "python", "function": nn.Linear, "args": {}},
}


@MAKERS
@pytest.mark.parametrize("name", OWN)
def test_hooks_that_need_more_than_its_calls_are_refused(name: str, make: Callable[..., Any]) -> None:
    hook = OWN[name] | ({"args": {"in_features": 2, "out_features": 2}} if name == "own" else {})
    with pytest.raises(
        hookrun.CompileError, match="a TorchScript module takes hooks on the values of its calls only"
    ):
        hookrun.compile({"h": hook}, make(Plain()), example=((X,), {}))


class Plain(nn.Module):
    """A small model with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.full((3,), 2.0))
        self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.head = nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(x * self.gain + self.shift))
        return out


def mixed() -> nn.Module:
    """Python around a TorchScript module and a plain one."""
    torch.manual_seed(0)
    body = scripted(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    return Net(lambda own, x: own.head(own.body(x)), body=body, head=nn.Linear(3, 2))


def results(model: nn.Module, hook: dict[str, Any]) -> list[Tensor]:
    """Outputs, gradients and captured values of two training steps under the hook."""
    plan = hookrun.compile({"h": hook}, model, example=((X,), {}))
    found = list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plan.install(model) as hooks:
        for _ in range(2):
            x = X.clone().requires_grad_()
            output = model(x)
            optimizer.zero_grad()
            output.square().sum().backward()
            optimizer.step()
            found += [output.detach(), x.grad]  # type: ignore[list-item]
        assert plan.unchecked is None
        assert hooks.fired["h", hook["select"]] > 0
        kept = hooks.captures.get("h", {})
        found += [value for values in kept.values() for value in values if isinstance(value, Tensor)]
    return [*found, *(each.detach() for each in model.state_dict().values())]

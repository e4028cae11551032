"""`stop_forward`: nothing after the module is computed; as an exception by hand that the caller catches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_nets import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hookrun

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
STOP: dict[str, Any] = {"select": "2", "hook": "forward", "action": "stop_forward"}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))


def capture(select: str = "*") -> dict[str, Any]:
    return {"select": select, "hook": "forward", "action": "capture"}


def test_captures_equal_those_of_the_whole_forward() -> None:
    model = network()
    with hookrun.hooked(model, {"seen": capture()}) as whole:
        model(X)
    plan = hookrun.compile({"stop": STOP, "seen": capture()}, model, example=((X,), {}))
    assert "stop stops the forward after 2: there is no output, and there are no metrics of it" in str(plan)
    with plan.install(model, strict=True) as hooks, FlopCounterMode(display=False) as counted:
        assert model(X) is None
    assert counted.get_total_flops() == 3 * (2 * 5 * 8 * 8)
    for path in "012":
        assert torch.equal(hooks.captures["seen"][path][0], whole.captures["seen"][path][0])
    assert hooks.inactive == [("seen", path, "never fired: stop stops the forward") for path in "34"]
    assert not [module for module in model.modules() if "_compiled_call_impl" in vars(module)]


def test_only_hooks_of_the_stopped_module_still_run() -> None:
    model = network()
    log = list[str]()
    with hookrun.hooked(model, {"stop": STOP, "twice": {**STOP, "select": ["2", "3"]}}) as hooks:
        for name, module in {"same": model[2], "next": model[3], "model": model}.items():
            module.register_forward_hook(lambda module, args, output, name=name: log.append(name))
        assert model(X) is None
    assert log == ["same"]
    assert hooks.fired["twice", "3"] == 0


def test_calls_outside_of_the_schedule_have_an_output() -> None:
    model = network()
    plain = model(X)
    with hookrun.hooked(model, {"stop": {**STOP, "when": {"step": [1]}}}) as hooks:
        assert torch.equal(model(X), plain)
        hooks.step()
        assert model(X) is None
        with hooks.paused():
            assert torch.equal(model(X), plain)
        assert torch.equal(copy.deepcopy(model)(X), plain)
    shared = nn.Linear(8, 8)
    again = nn.Sequential(shared, shared, shared)
    spec = {"stop": {**STOP, "select": "0", "when": {"call": [1]}}, "seen": capture("0")}
    with hookrun.hooked(again, spec) as hooks:
        assert again(X) is None
    assert hooks.fired["seen", "0"] == 2


def larger(then: Callable[[nn.Module, Tensor], Any]) -> Any:
    """A model around the network, which does something with its output."""
    return Net(lambda model, x: then(model.part, x), part=network())


def test_it_ends_at_the_model_that_the_hooks_are_installed_on() -> None:
    model = larger(lambda part, x: "went on" if part(x) is None else "whole")
    inner = {"stop": STOP}
    outer = {"stop": {**STOP, "select": "part.3"}}
    with hookrun.hooked(model.part, inner):
        assert model(X) == "went on"
        assert model.part(X) is None
        with hookrun.hooked(model.part, {"early": {**STOP, "select": "1"}, "seen": capture("2")}) as early:
            assert model(X) == "went on"
        assert early.fired["seen", "2"] == 0
    with hookrun.hooked(model, outer), hookrun.hooked(model.part, {"seen": capture("3")}):
        assert model(X) is None
    with hookrun.hooked(model, outer):
        assert model.part(X) is None, "its forward is the outermost call"


def swallowing(part: nn.Module, x: Tensor) -> Any:
    try:
        return part(x)
    except Exception:
        return x


def test_a_model_that_catches_the_exception_is_told() -> None:
    model = larger(swallowing)
    with (
        hookrun.hooked(model, {"stop": {**STOP, "select": "part.2"}}),
        pytest.raises(hookrun.HookError, match=r"on part\.2: code of the model around it has caught"),
    ):
        model(X)
    assert model(X).shape == X.shape


def test_it_stops_in_threads_as_in_functional_call() -> None:
    model = larger(lambda part, x: checkpoint(part, x, use_reentrant=False))
    ended = list[Any]()
    with hookrun.hooked(model, {"stop": {**STOP, "select": "part.2"}}):
        threads = [threading.Thread(target=lambda: ended.extend(model(X) for _ in range(9))) for _ in "123"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended.append(torch.func.functional_call(model, dict(model.named_parameters()), (X,)))
    assert ended == [None] * 28


def test_a_graph_cannot_contain_it() -> None:
    model = network()
    with hookrun.hooked(model, {"stop": STOP}) as hooks:
        plainly = torch.compile(model, backend="eager")
        for run in (hooks.compile, lambda: plainly(X), lambda: torch.export.export(model, (X,))):
            with pytest.raises(hookrun.CompileError, match="ends the forward by an exception"):
                run()
    torch.compiler.reset()

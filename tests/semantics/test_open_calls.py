"""Which call a hook belongs to, where calls end otherwise than by returning, or not in the order of their hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.engine.runtime.call_stack import open_calls

X = torch.arange(8.0).reshape(2, 4) / 8
KINDS = ["weight", "saved_tensors", "output_grad", "backward_pre", "backward"]


def test_a_call_that_no_hook_of_ours_began_ends_no_other_call() -> None:
    model = Recursive()
    with hooked(model, "", "weight"):
        # torch runs our hooks at the end of the inner call, though not at its beginning
        model.register_forward_pre_hook(refuse_inner, prepend=True)
        output = model(X)
    assert model.failed
    assert_close(output, X * 2)


class GoesOn(nn.Module):
    """Calls a layer that is interrupted, and then another one."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.interrupted = Interrupted(error)
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.interrupted(x)
        except BaseException as error:
            if not isinstance(error, self.interrupted.error):
                raise
        output: Tensor = self.layer(x) * self.weight
        return output


class Interrupted(nn.Linear):
    """Raises an error after its computation."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(4, 4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_on_after_an_inner_call_failed(kind: str, error: type[BaseException]) -> None:
    torch.manual_seed(0)
    model = GoesOn(error)
    expected = (X @ model.layer.weight.T + model.layer.bias) * 3
    if kind == "weight":
        expected = (X @ model.layer.weight.T * 2 + model.layer.bias) * 6
    with hooked(model, ["", "layer", "interrupted"], kind) as hooks:
        x = X.clone().requires_grad_()
        output = model(x)
        output.sum().backward()
        assert not open_calls()
    assert_close(output, expected)
    assert hooks.fired["h", "layer.weight" if kind == "weight" else "layer"] >= 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not model.interrupted.__dict__.keys() & {"weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_removed_in_a_call_leave_no_call_open(kind: str) -> None:
    class Removes(nn.Linear):
        remove: Callable[[], None]

        def forward(self, x: Tensor) -> Tensor:
            self.remove()
            return super().forward(x)

    model = Removes(4, 4)
    installed = hooked(model, "", kind)
    installed.__enter__()
    model.remove = lambda: installed.__exit__(None, None, None)
    plain = X @ model.weight.T + model.bias
    assert_close(model(X.clone().requires_grad_()), plain)
    assert not open_calls()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_threads_have_separate_calls() -> None:
    both_inside = Barrier(2, timeout=60)

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            both_inside.wait()
            return x.sigmoid()

    model = nn.Sequential(Waits(), nn.Linear(4, 4))
    spec = {"h": {"select": "*", "hook": "backward", "action": "capture"}}
    with hookrun.hooked(model, spec) as hooks, ThreadPoolExecutor(2) as threads:
        inputs = [X.clone().requires_grad_(), (X + 1).requires_grad_()]
        for output in threads.map(model, inputs):
            output.sum().backward()
        assert not any(threads.map(lambda _: open_calls(), range(2)))
    captured = [gradients["grad_input"] for gradients in hooks.captures["h"]["0"]]
    assert_close(captured, [x.grad for x in inputs])


def test_a_thread_that_exited_in_a_call_keeps_no_edited_weight() -> None:
    class ExitsOnce(nn.Linear):
        exited = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.exited:
                self.exited = True
                raise SystemExit
            return super().forward(x)

    model = ExitsOnce(4, 4)

    def call_until_exit() -> None:
        with suppress(SystemExit):
            model(X)

    with hooked(model, "", "weight"):
        thread = Thread(target=call_until_exit)
        thread.start()
        thread.join()
        assert model.exited
        assert_close(model(X), X @ model.weight.T * 2 + model.bias)
    assert_close(model(X), X @ model.weight.T + model.bias)


class Generates(nn.Module):
    """Generates with a cache of its own, which ends with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.cache: weakref.ref[nn.Module] | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed(input_ids)
        return embedded

    def generate(self, input_ids: Tensor) -> Tensor:
        cache = nn.Module()
        self.cache = weakref.ref(cache)
        for _ in range(3):
            scores = self(input_ids)
            input_ids = torch.cat([input_ids, scores.argmax(-1)[:, -1:]], dim=1)
        return input_ids


def test_what_a_generation_holds_is_freed_when_it_ends() -> None:
    model = Generates()
    spec = {"h": {"select": "embed", "hook": "forward", "action": "stats", "tokens": {"position": -1}}}
    with hookrun.hooked(model, spec) as hooks:
        model.generate(torch.tensor([[1, 2]]))
        assert model.cache is not None
        assert model.cache() is None
        assert hooks.fired["h", "embed"] == 3


def hooked(model: nn.Module, select: str | list[str], kind: str, action: dict[str, Any] | None = None) -> Any:
    action = {"action": "stats"} if action is None else action
    if kind == "weight":
        action = {"action": "scale", "factor": 2.0}
        select = [f"{path}.weight".lstrip(".") for path in ([select] if isinstance(select, str) else select)]
    return hookrun.hooked(model, {"h": {"select": select, "hook": kind, **action}})


class Recursive(nn.Module):
    """Calls itself once, and goes on when that call fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.failed = False

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if depth:
            try:
                self(x, depth - 1)
            except ValueError:
                self.failed = True
        return x * self.weight


def refuse_inner(module: nn.Module, args: tuple[Any, ...]) -> None:
    if len(args) > 1:
        raise ValueError("an inner call")

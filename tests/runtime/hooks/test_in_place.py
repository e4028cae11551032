"""Edits overwrite a large output only if nothing else refers to it: every other holder of it still has its value."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hookrun
from hookrun.runtime import in_parts as parts
from hookrun.runtime.hooks import forward as hooks_of_forward
from hookrun.runtime.sole_reference import SoleReference

pytestmark = pytest.mark.before_compilers
SPEC = {
    "a": {"hook": "forward", "action": "scale", "factor": 2.5},
    "b": {"hook": "forward", "action": "add_bias", "value": -0.1},
    "c": {"hook": "forward", "action": "clamp", "min": -1, "max": 2},
}
Body = Callable[[nn.Module, Tensor], Any]


def edited(x: Tensor) -> Tensor:
    """The expected result, by plain torch, out of place."""
    return (x * 2.5 + -0.1).clamp(-1, 2)


def on(path: str) -> dict[str, dict[str, Any]]:
    return {name: {"select": path, **hook} for name, hook in SPEC.items()}


class Computing(nn.Module):
    """Runs a function; what the function keeps is in `kept`."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.kept: Any = None
        self.weight = nn.Parameter(torch.full((40,), 3.0))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each output that was edited in parts was overwritten; tensors count as large from ten elements."""
    found = list[bool]()

    def told(functions: list[parts.Into], x: Tensor, *, overwrite: bool) -> Tensor:
        new = parts.in_parts(functions, x, overwrite=overwrite)
        assert (new is x) == overwrite
        found.append(overwrite)
        return new

    monkeypatch.setattr(parts, "SMALLEST", 10)
    monkeypatch.setattr(hooks_of_forward, "in_parts", told)
    monkeypatch.setattr(
        hooks_of_forward._OUTPUTS, "_expected", None
    )  # independent of earlier attempts in this process
    monkeypatch.setattr(hooks_of_forward._OUTPUTS, "_left", 3)
    yield found


def keep(value: Callable[[Tensor], Any]) -> Body:
    def body(module: Any, x: Tensor) -> Tensor:
        out = x * 1.5
        module.kept = value(out)
        return out

    return body


def buffer(module: Any, x: Tensor) -> Tensor:
    """One tensor for every call, as a cache has it."""
    module.kept = torch.zeros(40) if module.kept is None else module.kept
    return module.kept.copy_(x)


def used_by_a_graph(module: Any, x: Tensor) -> Tensor:
    """Autograd saves the output for the gradient of another product, though it does not require a gradient itself."""
    out = x * 1.5
    module.kept = (out * module.weight).sum()
    return out


def with_attribute(module: Any, x: Tensor) -> Tensor:
    out: Any = x * 1.5
    out.note = "an edit makes a tensor without it"
    return out


def frame(out: Tensor) -> Any:
    """A suspended generator that has the value among its variables."""

    def waiting(value: Tensor) -> Iterator[Tensor]:
        yield value[:0]
        yield value

    left = waiting(out)
    next(left)
    return left


NOBODY: dict[str, Body] = {
    "new": lambda module, x: x * 1.5,
    "a chain": lambda module, x: (x * 1.5).relu_().add_(0.1),
    "what had views": lambda module, x: [(y := x * 1.5), y[:3].add_(1), y.view(5, 8)][0],
    "a copy is kept": keep(Tensor.clone),
    "a number is kept": keep(Tensor.sum),
}
SOMEBODY: dict[str, Body] = {
    "the caller": lambda module, x: x,
    "the caller, of what was computed in place": lambda module, x: x.relu_(),
    "the caller, of a view": lambda module, x: x.view(-1),
    "the caller, of a slice": lambda module, x: x[10:30],
    "an attribute": keep(lambda out: out),
    "a list": keep(lambda out: [out]),
    "a closure": keep(lambda out: lambda: out),
    "a default argument": keep(lambda out: SimpleNamespace(get=lambda out=out: out)),
    "a frame": keep(frame),
    "a bound method": keep(lambda out: out.sum),
    "a detached alias": keep(Tensor.detach),
    "a view": keep(lambda out: out[:4]),
    "a storage": keep(Tensor.untyped_storage),
    "an array": keep(Tensor.numpy),
    "an array over the same memory": keep(lambda out: np.asarray(out)[::2]),
    "another library": keep(torch.utils.dlpack.to_dlpack),
    "a weak reference": keep(weakref.ref),
    "a lazy copy": keep(torch._lazy_clone),
    "a cache": buffer,
    "memory of an array": lambda module, x: torch.from_numpy(x.numpy() * np.float32(1.5)),
    "shared memory": lambda module, x: (x * 1.5).share_memory_(),
    "a tensor in a larger storage": lambda module, x: torch.cat([x, x])[:40],
    "an attribute of its own": with_attribute,
}


def snapshot(value: Any) -> Any:
    """The present value of a holder, as an independent copy."""
    if isinstance(value, weakref.ref):
        return None  # whether the value is still alive is tested elsewhere
    if isinstance(value, Iterator):
        return next(value).clone()
    if isinstance(value, torch.UntypedStorage):
        return value.tolist()
    if type(value).__name__ == "PyCapsule":
        return torch.utils.dlpack.from_dlpack(value).clone()
    if isinstance(value, SimpleNamespace):
        value = value.get
    if callable(value) and not isinstance(value, Tensor):
        value = value()
    return copy.deepcopy(value[0] if isinstance(value, list) else value)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_an_output_is_overwritten_only_if_nothing_else_refers_to_it(
    mode: Callable[[], AbstractContextManager[Any]], overwritten: list[bool]
) -> None:
    for bodies, alone in ((NOBODY, True), (SOMEBODY, False)):
        for name, body in bodies.items():
            x = torch.linspace(-3, 3, 40)
            with mode():
                plain, given = Computing(body), x.clone()
                wanted = edited(plain(given))
                model, mine = Computing(body), x.clone()
                with hookrun.hooked(model, on("")):
                    found = model(mine)
            assert torch.equal(found, wanted), name
            assert torch.equal(mine, given), name
            with torch.inference_mode():
                assert same(snapshot(model.kept), snapshot(plain.kept)), name
            assert overwritten == [alone], name
            overwritten.clear()


def test_tensors_saved_by_autograd_are_not_overwritten(overwritten: list[bool]) -> None:
    x = torch.linspace(-3, 3, 40)
    model = Computing(used_by_a_graph)
    with hookrun.hooked(model, on("")):
        found = model(x)
    model.kept.backward()
    assert torch.equal(found, edited(x * 1.5)) and overwritten == [False]
    assert model.weight.grad is not None and torch.equal(model.weight.grad, x * 1.5)


def test_earlier_hooks_keep_the_values_that_they_saw(overwritten: list[bool]) -> None:
    """By hand, by hookrun at the same module and at an inner one, and by hooks of all modules."""
    x = torch.linspace(-3, 3, 40)
    seen = list[Tensor]()
    for register in (
        lambda model: model[0].register_forward_hook(lambda module, args, out: seen.append(out)),
        lambda model: torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, out: seen.append(out)
        ),
    ):
        seen.clear()
        model = nn.Sequential(Computing(NOBODY["new"]))
        with torch.no_grad():
            handle = register(model)
            with hookrun.hooked(model, on("0")):
                found = model(x)
            handle.remove()
        assert torch.equal(seen[0], x * 1.5) and torch.equal(found, edited(x * 1.5))
        assert overwritten == [False]
        overwritten.clear()
    model = nn.Sequential(Computing(NOBODY["new"]))
    capture = {"hook": "forward", "action": "capture"}
    with torch.no_grad(), hookrun.hooked(model, {"kept": {"select": "0", **capture}, **on("")}) as hooks:
        for _ in range(3):  # captured by reference while nothing was found to write into it
            assert torch.equal(model(x), edited(x * 1.5))
        assert all(torch.equal(value, x * 1.5) for value in hooks.captures["kept"]["0"])
    assert overwritten == [False] * 3


def test_several_modules_can_return_one_tensor(overwritten: list[bool]) -> None:
    """Identity and dropout return their input, an in-place ReLU writes into it."""
    x = torch.linspace(-3, 3, 40)
    layers = [Computing(NOBODY["new"]), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(), nn.Identity()]
    model = nn.Sequential(*layers).eval()
    with torch.no_grad(), hookrun.hooked(model, on("*")):
        found = model(x)
    step = edited(edited(x * 1.5)).relu()
    for _ in range(3):
        step = edited(step)
    assert torch.equal(found, step) and overwritten == [True, False, False, False, False]


def test_under_transforms_modes_and_traces_nothing_is_overwritten(overwritten: list[bool]) -> None:
    x = torch.linspace(-3, 3, 40)
    model = Computing(NOBODY["new"]).eval()
    wanted = edited(x * 1.5)
    with torch.no_grad(), hookrun.hooked(model, on("")):
        assert torch.equal(torch.func.vmap(model)(x.expand(3, 40)), wanted.expand(3, 40))
        with forward_ad.dual_level():
            assert torch.equal(model(x), wanted)
        with FlopCounterMode(display=False):
            assert torch.equal(model(x), wanted)
        with torch.device("cpu"):
            assert torch.equal(model(x), wanted)
        assert overwritten == []
        assert torch.equal(model(x), wanted) and overwritten == [True]


def test_tensors_with_gradients_are_not_overwritten(overwritten: list[bool]) -> None:
    """Also where checkpointing runs the module without gradients first and with them later."""
    for reentrant in (True, False):
        gradients = []
        for hooks in (on("0"), {}):
            x = torch.linspace(-3, 3, 40, requires_grad=True)
            model = nn.Sequential(Computing(NOBODY["new"]))
            with hookrun.hooked(model, hooks) if hooks else nullcontext():
                out = checkpoint(model, x, use_reentrant=reentrant)
                (out if hooks else edited(out)).square().sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
    overwritten.clear()
    with torch.no_grad(), hookrun.hooked(model, on("")):
        leaf = Computing(lambda module, x: torch.ones(40, requires_grad=True))
        with hookrun.hooked(leaf, on("")):
            assert not leaf(x).requires_grad and overwritten == [False]


def test_an_inference_tensor_outside_its_mode_is_not_overwritten(overwritten: list[bool]) -> None:
    def body(module: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return x * 1.5

    x = torch.linspace(-3, 3, 40)
    with torch.no_grad(), hookrun.hooked(model := Computing(body), on("")):
        assert torch.equal(model(x), edited(x * 1.5)) and overwritten == [False]


def test_threads_overwrite_their_own_values_only(overwritten: list[bool]) -> None:
    model = Computing(NOBODY["new"])
    inputs = [torch.linspace(-3, 3, 40) + number for number in range(60)]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    with hookrun.hooked(model, on("")), ThreadPoolExecutor(4) as pool:
        for x, found in zip(inputs, pool.map(run, inputs), strict=True):
            assert torch.equal(found, edited(x * 1.5))
    assert len(overwritten) == 60


def test_tensors_in_containers_are_not_overwritten(overwritten: list[bool]) -> None:
    x = torch.linspace(-3, 3, 40)
    model = Computing(lambda module, x: {"h": (x * 1.5, x)})
    with torch.no_grad(), hookrun.hooked(model, on("")):
        first, second = model(x)["h"]
    assert torch.equal(first, edited(x * 1.5)) and torch.equal(second, edited(x))
    assert torch.equal(x, torch.linspace(-3, 3, 40)) and overwritten == []


def test_another_way_of_calling_hooks_is_not_trusted(overwritten: list[bool]) -> None:
    """A caller of the hooks may use the value that it passed afterwards."""
    x = torch.linspace(-3, 3, 40)
    model = Computing(NOBODY["new"])
    with torch.no_grad(), hookrun.hooked(model, on("")):
        (hook,) = model._forward_hooks.values()
        out = model.forward(x)
        assert torch.equal(hook(model, (x,), out), edited(x * 1.5))
        assert torch.equal(out, x * 1.5) and overwritten == [False]


def test_without_reliable_reference_counts_nothing_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(of: SoleReference, references: Callable[[Any], int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            answers.append(of.overwritable(out, references(out), sys._getframe(1).f_code))

        return hook

    answers = list[bool]()
    numbers = iter(range(10**6))
    for references, may in (
        (sys.getrefcount, True),
        (
            lambda out: sys.getrefcount(out) + 5,
            False,
        ),  # more references than the call has: another call may have fewer
        (lambda out: 4, False),
        (lambda out: next(numbers) % 3, False),
    ):
        of = SoleReference(lambda module, of=None: None, 10)
        of._register = lambda module, of=of, references=references: module.register_forward_hook(
            asked(of, references)
        )
        model = Computing(NOBODY["new"])
        model.register_forward_hook(asked(of, references))
        answers.clear()
        with torch.no_grad():
            model(torch.zeros(40))
        assert answers[-1] == may
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1)
    assert SoleReference(lambda module: None, 10)._left == 0

"""Direct calls: a module whose only hook is hookrun's behaves as if other hooks were present."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import weight_norm

import hookrun
from hookrun.engine.runtime.fast.direct_calls import maker

# Some set-ups leave hooks unused, and `torch.jit.trace` is deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning"),
]

X = torch.linspace(-2, 2, 12).reshape(3, 4)
DOUBLE = {"double": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}}
PLUS = {"plus": {"select": "0", "hook": "forward", "action": "add_bias", "value": 1.0}}
SEEN = {"seen": {"select": "**", "hook": "forward", "action": "capture"}}
GRADIENTS = {"of": {"select": "{0,1,2}", "hook": "output_grad", "action": "capture"}}


def test_a_model_that_will_be_compiled_is_called_by_torch() -> None:
    """Guards of a graph check everything that was read for it, so a direct call must not be part of it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    plain = model(x)
    with hookrun.hooked(
        model, {"h": {"select": "1", "hook": "forward", "action": "scale", "factor": 2}}
    ) as hooks:
        assert is_called_directly(model[1])
        hooks.compile()
        assert not is_called_directly(model[1])
        assert torch.equal(model(x), plain * 2)
        assert hooks.fired["h", "1"] == 1
    assert torch.equal(model(x), plain)


def test_it_is_called_directly_until_the_hooks_are_removed() -> None:
    model = net()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    with hookrun.hooked(model, {**DOUBLE, **SEEN}):
        assert [is_called_directly(module) for module in model.modules()] == [True] * 4
        with hookrun.hooked(model, PLUS):  # another installation does not mistake it for a compiled model
            assert torch.equal(
                called(model[0], X), nn.functional.linear(X, model[0].weight, model[0].bias) * 2 + 1
            )
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    first = hookrun.hooked(model, DOUBLE)
    second = hookrun.hooked(model, PLUS)
    plain = called(model[0], X)
    with ExitStack() as stack:
        first.__enter__()
        stack.enter_context(second)
        first.__exit__(None, None, None)  # in the other order
        assert torch.equal(called(model[0], X), plain + 1)
    assert torch.equal(called(model[0], X), plain)
    assert not is_set(model[0])


OTHERS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda module, seen: module.register_forward_hook(
        lambda m, a, out: seen.append(out.detach().clone())
    ),
    "forward, first": lambda module, seen: module.register_forward_hook(
        lambda m, a, out: seen.append(out.detach().clone()), prepend=True
    ),
    "forward with kwargs": lambda module, seen: module.register_forward_hook(
        lambda m, a, k, out: seen.append(len(a) + len(k)), with_kwargs=True
    ),
    "forward_pre": lambda module, seen: module.register_forward_pre_hook(lambda m, a: seen.append(len(a))),
    "backward": lambda module, seen: module.register_full_backward_hook(lambda *_: seen.append(1)),
    "backward_pre": lambda module, seen: module.register_full_backward_pre_hook(lambda *_: seen.append(2)),
    "global": lambda module, seen: register_module_forward_hook(
        lambda m, a, out: seen.append(len(type(m).__name__))
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_hooks_of_others_run_in_order(kind: str) -> None:
    """As beside a hand-written hook, whenever they are registered and removed."""
    found = []
    for ours in (True, False):
        model = net()
        seen = list[Any]()
        with ExitStack() as stack:
            if ours:
                stack.enter_context(hookrun.hooked(model, DOUBLE))
            else:
                model[0].register_forward_hook(lambda m, a, out: out * 2)
            called(model, X)
            handle = OTHERS[kind](model[0], seen)
            output = called(model, X.clone().requires_grad_())
            output.sum().backward()
            handle.remove()
            called(model, X)
            found.append([output.detach(), model[0].weight.grad, *seen])
    assert len(found[0]) > 2
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_hooks_that_change_while_the_forward_runs() -> None:
    class Changing(nn.Module):
        change: Callable[[], object] | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.change is not None:
                self.change()
            return x + 1

    model = Changing()
    seen = list[Tensor]()
    hooks = hookrun.hooked(model, {"h": {"select": "", "hook": "forward", "action": "scale", "factor": 2.0}})
    with hooks:
        assert torch.equal(called(model, X), (X + 1) * 2)
        model.change = lambda: model.register_forward_hook(
            lambda m, a, k, out: seen.append(out), with_kwargs=True
        )
        called(model, X)
        assert torch.equal(seen[0], (X + 1) * 2)
        model._forward_hooks.popitem()
        model.change = lambda: hooks.__exit__(None, None, None)
        assert torch.equal(called(model, X), X + 1)


class OwnState(nn.Linear):
    """Its copies take over its whole state."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


@pytest.mark.parametrize("kind", [nn.Linear, OwnState])
def test_replicas_call_their_own_weights(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(4, 4))
    plain = called(model, X)
    with hookrun.hooked(model, DOUBLE):
        assert is_set(model[0]) == (kind is nn.Linear)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            assert torch.equal(called(other, X), plain)
        other = copy.copy(model[0])
        assert not is_set(other)
        # DataParallel calls a replica in its own thread; the hooks are those of the original
        replica = model[0]._replicate_for_data_parallel()
        for name, parameter in model[0].named_parameters():
            setattr(replica, name, parameter.detach() * 3)
        outputs = list[Tensor]()
        for module in (replica, model[0]):
            thread = threading.Thread(target=lambda module=module: outputs.append(module(X)))
            thread.start()
            thread.join()
        torch.testing.assert_close(outputs, [plain * 6, plain * 2])


def test_compilers_see_the_hook() -> None:
    model = net()
    plain = called(model[0], X)
    with hookrun.hooked(model, DOUBLE), torch.no_grad():
        expected = called(model, X)
        for part, wanted in ((model, expected), (model[0], plain * 2), (model[0].__call__, plain * 2)):
            torch._dynamo.reset()
            compiled = torch.compile(part, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(X), wanted)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.jit.trace(model, X, check_trace=False)(X), expected)
        torch.testing.assert_close(torch.func.vmap(model)(X), expected)
        weights = {name: parameter * 0 for name, parameter in model.named_parameters()}
        assert not torch.func.functional_call(model, weights, X).any()
        model[0].compile(backend="eager")
        torch.testing.assert_close(called(model[0], X), plain * 2)
    assert is_set(model[0]), "what the user compiled stays"
    torch._dynamo.reset()


def test_calls_by_keyword_see_the_hook() -> None:
    model = net()
    plain = called(model[0], X)
    with hookrun.hooked(model, {**DOUBLE, **SEEN}) as hooks:
        for _ in range(3):
            assert torch.equal(model[1](input=X), X.relu())
        for number in range(1, 4):
            outputs = list[Tensor]()
            thread = threading.Thread(target=lambda found=outputs: found.append(called(model[0], X)))
            thread.start()
            thread.join()
            assert torch.equal(outputs[0], plain * 2)
            assert hooks.fired["double", "0"] == hooks.fired["seen", "0"] == number
        with pytest.raises(TypeError, match="positional arguments"):
            model[1](X, X)
        for each in hooks.captures["seen"]["1"]:
            assert each.equal(X.relu())
        assert hooks.fired["seen", "1"] == len(hooks.captures["seen"]["1"]) == 3


@pytest.mark.parametrize("change", ["nothing", "inplace", "forward"])
def test_captures_share_no_memory(change: str) -> None:
    """Also if a layer starts to write in place, or is given another forward, after the hooks."""
    model = net()
    given = torch.empty(3, 4)
    array = given.numpy()
    with torch.no_grad(), hookrun.hooked(model, SEEN) as hooks:
        called(model, X)
        if change == "inplace":
            model[1].inplace = True
        elif change == "forward":
            model[1].forward = MethodType(lambda self, x: x.relu_(), model[1])  # type: ignore[method-assign]
        for number in range(1, 4):
            given.fill_(-1)[0] = number
            output = called(model[1], given)
            kept = hooks.captures["seen"]["1"][number]
            before = kept.clone()
            assert (output.data_ptr() == array.ctypes.data) == (change != "nothing")
            array[:] = 7
            output.numpy()[:] = 8
            output.add_(1)
            assert torch.equal(kept, before)
            assert before[0].eq(number).all()
            assert not before[1:].any()
        del model[1].__dict__["forward" if change == "forward" else "inplace"]


def test_a_gradient_in_foreign_memory_is_cloned() -> None:
    model = net()
    with hookrun.hooked(model, GRADIENTS) as hooks:
        kept = hooks.captures["of"]
        for number, shared in enumerate((lambda x: x.numpy(), np.from_dlpack, torch.from_dlpack)):
            gradient = torch.full((3, 4), 2.0)
            array = shared(gradient)
            called(model, X).backward(gradient)
            gradient.fill_(5)
            assert (np.asarray(array) == 5).all(), "it is still one memory"
            assert kept["2"][number].eq(2).all()
        assert [len(kept[name]) for name in "012"] == [3, 3, 3]


def test_copied_attributes_cause_no_direct_call() -> None:
    model = net()
    torch.nn.init.ones_(model[2].bias)
    with hookrun.hooked(model, SEEN) as hooked:
        weight_norm(model[0])  # gives the module a class with its own deep copy
        copied = copy.deepcopy(model)
        replicas = [model[2]._replicate_for_data_parallel(), nn.Linear.__new__(nn.Linear)]
        replicas[1].__dict__ = {**vars(model[2]), "_parameters": {}}
        for replica in replicas:
            replica.weight, replica.bias = torch.zeros(4, 4), torch.zeros(4)
            assert not called(replica, X).any()
        before = len(hooked.captures["seen"]["0"])
        with torch.no_grad():
            copied[0].bias.zero_()
            copied[0].parametrizations.weight.original0.zero_()
        assert not called(copied[0], X).any()
        assert len(hooked.captures["seen"]["0"]) == before
    assert not called(copied[0], X).any()
    assert called(model[0], X).any()


def test_a_replacement_of_torchs_call_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    original = nn.Module._call_impl

    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(self).__name__)
        return original(self, *args, **kwargs)

    class Swapped(nn.Linear):
        _call_impl = replaced

    model = net()
    with hookrun.hooked(model, SEEN) as hooked:
        model[0]._call_impl = lambda x: replaced(model[0], x)
        model[2].__class__ = Swapped
        called(model, X)
        assert seen == ["Linear", "Swapped"]
        seen.clear()
        with monkeypatch.context() as patched:
            patched.setattr(nn.Module, "_call_impl", replaced)
            called(model[1], X)
        assert seen == ["ReLU"]
        assert len(hooked.captures["seen"]["1"]) == 2


@pytest.mark.parametrize("shared", ["numpy", "dlpack"])
def test_a_replaced_function_may_return_reused_memory(shared: str, monkeypatch) -> None:
    buffer = torch.zeros(3, 4)
    others = buffer.numpy() if shared == "numpy" else torch.from_dlpack(buffer.__dlpack__())
    model = net()
    with hookrun.hooked(model, SEEN) as hooked:
        with monkeypatch.context() as patched:
            patched.setattr(nn.functional, "relu", lambda x, inplace=False: buffer)
            called(model[1], X)
        others[:] = 7
        assert buffer.eq(7).all(), "they have lost each other"
        assert not hooked.captures["seen"]["1"][0].any()


def test_modules_that_allocate_their_output_are_recognised() -> None:
    class Own(nn.Linear):
        """A subclass may return anything."""

    assert maker(nn.Linear(2, 2)) is nn.Linear.forward
    assert maker(nn.ReLU()) is nn.ReLU.forward
    for other in (nn.ReLU(inplace=True), Own(2, 2), nn.Identity(), nn.Flatten()):
        assert maker(other) is None, other


def test_gradients_equal_those_of_a_hook_on_the_output() -> None:
    """Tensors of two and three dimensions, written in place afterwards or not, with another hook on the tensor."""
    for shape in ((3, 4), (2, 3, 4)):
        for in_place in (False, True):
            x = torch.randn(shape)
            found = list[list[Tensor | None]]()
            for ours in (True, False):
                model = net()
                seen = list[Tensor]()
                with ExitStack() as stack:
                    if ours:
                        spec = {"select": "{0,1}", "hook": "output_grad", "action": "scale", "factor": 3.0}
                        stack.enter_context(hookrun.hooked(model, {"h": spec}))
                    hidden = called(model[0], x)
                    if not ours:
                        # torch 2.14 returns a view for three dimensions, whose hook an in-place write would remove.
                        hidden = hidden * 1
                        hidden.register_hook(lambda grad: grad * 3)
                    if in_place:  # after which torch calls no tensor hook of a view
                        hidden = hidden.mul_(2) if ours else hidden * 2
                    hidden = called(model[1], hidden)
                    if not ours:
                        hidden.register_hook(lambda grad: grad * 3)
                    hidden.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))  # type: ignore[misc]
                    called(model[2], hidden).square().sum().backward()
                found.append([*seen, *(parameter.grad for parameter in model.parameters())])
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    with hookrun.hooked(model, GRADIENTS) as hooks:
        output = called(model, X)
    output.sum().backward()
    assert not any(hooks.fired.values()), "no hook runs after the block"
    model.requires_grad_(False)
    with hookrun.hooked(model, GRADIENTS), pytest.raises(hookrun.HookrunError, match="carries no gradient"):
        called(model, X)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def is_called_directly(module: nn.Module) -> bool:
    return hasattr(vars(module).get("_compiled_call_impl"), "hooks_fire")


def is_set(module: nn.Module) -> bool:
    return "_compiled_call_impl" in vars(module)


def called(module: nn.Module, *args: Any) -> Tensor:
    return module(*args)  # type: ignore[no-any-return]

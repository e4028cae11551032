"""A captured value is the value at hook time, even if it is written later; it is copied only if it is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import hookrun
from hookrun.runtime import fast

WIDTH = 4


class Written(nn.Module):
    """A random module that writes to its input or to the base of its input, or returns a view."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "add_":
                return x.add_(1)
            case "mul_":
                x.mul_(2)
                return x
            case "relu_":
                return functional.relu_(x)
            case "slice":
                x[:, :2] = 0.5
                return x
            case "view":
                return x.view(-1).view_as(x)
            case "half":
                x[:, 2:].add_(3)
                return x * 1
            case "transpose":
                return x.t().mul_(1.5).t()
            case "out":
                return torch.sin(x * 1, out=torch.empty(0)) if not x.requires_grad else x.sin()
        return x


class Late(nn.Module):
    """Runs its layers, then writes to the output of one of them."""

    def __init__(self, layers: list[nn.Module], late: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        kept = None
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.late:
                kept = x
        total = x * 1
        if kept is not None:
            with torch.no_grad():
                kept.detach().fill_(9)
        return total


KINDS = ["add_", "mul_", "relu_", "slice", "view", "half", "transpose", "out"]


def random_model(seed: int) -> nn.Module:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    make: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Hardtanh(inplace=True),
        lambda: nn.Dropout(0.3, inplace=True),
        lambda: nn.Identity(),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.Flatten(),
        lambda: Written(draw.choice(KINDS)),
        lambda: Written(draw.choice(KINDS)),
    ]
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    layers += [draw.choice(make)() for _ in range(draw.randint(2, 7))]
    return Late(layers, draw.randint(-1, len(layers) - 1)).train(draw.random() < 0.5)


def by_hand(model: nn.Module, run: Callable[[], object]) -> dict[str, dict[str, list[Tensor]]]:
    """The values that hand-written hooks clone."""
    seen: dict[str, dict[str, list[Tensor]]] = {"out": {}, "pre": {}}
    handles = list[Any]()
    for path, module in model.named_modules():
        if list(module.children()):
            continue

        def pre(_m: nn.Module, args: tuple[Tensor], path: str = path) -> None:
            seen["pre"].setdefault(path, []).append(args[0].detach().clone())

        def out(_m: nn.Module, _args: object, output: Tensor, path: str = path) -> None:
            seen["out"].setdefault(path, []).append(output.detach().clone())

        handles += [module.register_forward_pre_hook(pre), module.register_forward_hook(out)]
    run()
    for handle in handles:
        handle.remove()
    return seen


CAPTURES = {
    "pre": {"select": {"path": "**", "leaf": True}, "hook": "forward_pre", "action": "capture"},
    "out": {"select": {"path": "**", "leaf": True}, "hook": "forward", "action": "capture"},
}
MODES: dict[str, Any] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(5))
def test_captures_equal_clones_in_random_models_with_in_place_writes(part: int, mode: str) -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    for seed in range(part * 8, part * 8 + 8):
        model = random_model(seed)

        def run(model: nn.Module = model, seed: int = seed) -> None:
            for number in range(3):  # the first firings decide how later ones are copied
                torch.manual_seed(seed + number)
                with MODES[mode]():
                    model(x.clone())

        expected = by_hand(model, run)
        with hookrun.hooked(model, CAPTURES) as hooks:
            run()
        for name in ("pre", "out"):
            for path, values in expected[name].items():
                assert_close(hooks.captures[name][path], values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("part", range(4))
def test_captured_gradients_equal_clones_in_random_models(part: int) -> None:
    """Another action, or the user, writes to the gradients later."""
    for seed in range(part * 25, part * 25 + 25):
        torch.manual_seed(seed)
        draw = random.Random(seed)
        acts = [nn.Tanh, nn.Sigmoid, lambda: nn.ReLU(inplace=True), nn.Identity]
        layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), draw.choice(acts)())]
        model = nn.Sequential(*layers)
        x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
        model(x).square().sum().backward()
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        spec = {
            "seen": {"select": "**", "hook": "grad", "action": "capture"},
            "scaled": {"select": "**", "hook": "grad", "action": "scale", "factor": 3},
            "total": {"select": "**", "hook": "post_accumulate_grad", "action": "capture"},
        }
        with hookrun.hooked(model, spec) as hooks:
            model(x).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad.zero_()  # type: ignore[union-attr]
        for name, gradient in expected.items():
            assert_close(hooks.captures["seen"][name], [gradient])
            assert_close(hooks.captures["total"][name], [3 * gradient])


class Copies(TorchDispatchMode):
    """Counts the operations that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten.clone.default,
            torch.ops.aten.copy_.default,
            torch.ops.aten._to_copy.default,
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not fast.IS_ON, reason="these are copies on write")
@pytest.mark.parametrize("grad", [True, False])
def test_without_writes_nothing_is_copied(grad: bool) -> None:
    """No operation copies a tensor, and each capture has the output's own memory."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    outputs: list[Tensor] = []
    for module in model:
        module.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    x = torch.ones(3, WIDTH)
    with hookrun.hooked(model, CAPTURES) as hooks, torch.set_grad_enabled(grad), Copies() as copies:
        for _ in range(4):
            model(x)
    assert copies.count == 0
    captured = [hooks.captures["out"][str(number)][turn] for turn in range(4) for number in range(3)]
    for ours, theirs in zip(captured, outputs, strict=True):
        assert torch._C._data_address(ours) == torch._C._data_address(theirs)


def test_an_output_that_is_written_later_is_copied_once_per_firing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    spec = {"h": {"select": "0", "hook": "forward", "action": "capture"}}
    with hookrun.hooked(model, spec) as hooks, torch.no_grad():
        outputs = [model(torch.full((3, WIDTH), float(number))) for number in range(5)]
    for number, output in enumerate(outputs):
        kept = hooks.captures["h"]["0"][number]
        assert torch._C._data_address(kept) != torch._C._data_address(output)
        assert_close(kept, model[0](torch.full((3, WIDTH), float(number))).detach())


FOREIGN: dict[str, Callable[[], Tensor]] = {
    "from NumPy": lambda: torch.from_numpy(np.ones((2, 2), dtype=np.float32)),
    "shared memory": lambda: torch.ones(2, 2).share_memory_(),
    "a parameter": lambda: nn.Parameter(torch.ones(2, 2)),
    "a slice": lambda: torch.ones(4, 4)[1:3, 1:3],
    "expanded": lambda: torch.ones(2, 1).expand(2, 2).clone().t(),
    "conjugate": lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.ones(2, 2)),
    "integers": lambda: torch.ones(2, 2, dtype=torch.int64),
    "booleans": lambda: torch.ones(2, 2, dtype=torch.bool),
    "empty": lambda: torch.ones(0, 2),
    "no dimensions": lambda: torch.ones(()),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_capture_keeps_the_value_for_every_kind_of_memory(name: str) -> None:
    tensor = FOREIGN[name]()
    expected = tensor.detach().clone()
    model = nn.Identity()
    with hookrun.hooked(model, {"h": {"select": "", "hook": "forward", "action": "capture"}}) as hooks:
        for _ in range(3):
            model(tensor)
        with torch.no_grad():
            tensor.zero_()
        model(tensor)
    found = hooks.captures["h"][""]
    assert_close(found, [expected] * 3 + [torch.zeros_like(expected)])
    assert not any(each.requires_grad for each in found)


@pytest.mark.parametrize("name", ["from NumPy", "a slice", "a parameter"])
def test_a_write_to_a_capture_does_not_change_the_model(name: str) -> None:
    tensor = FOREIGN[name]()
    expected = tensor.detach().clone()
    with hookrun.hooked(
        nn.Identity(), {"h": {"select": "", "hook": "forward", "action": "capture"}}
    ) as hooks:
        hooks._model(tensor)
    hooks.captures["h"][""][0].fill_(7)
    assert_close(tensor.detach(), expected)


def test_a_captured_sparse_tensor_does_not_follow_later_writes() -> None:
    tensor = torch.eye(3).to_sparse()
    model = nn.Identity()
    with hookrun.hooked(model, {"h": {"select": "", "hook": "forward", "action": "capture"}}) as hooks:
        model(tensor)
        tensor.coalesce().values().zero_()
    assert_close(hooks.captures["h"][""][0].to_dense(), torch.eye(3))


def test_a_captured_view_does_not_follow_writes_to_its_base() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    model = nn.Identity()
    with hookrun.hooked(model, {"h": {"select": "", "hook": "forward", "action": "capture"}}) as hooks:
        model(base[0])
        model(base.t())
        base.zero_()
        base.numpy()[:] = 5  # a write that torch cannot see
    assert_close(hooks.captures["h"][""], [torch.arange(3.0), torch.arange(6.0).reshape(2, 3).t()])

"""Without a private name of torch, or with `HOOKRUN_FAST=0`, the plain way gives the same results."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.runtime import fast
from hookrun.runtime.fast import copies, direct_calls, small_tensors

FILES = (copies, direct_calls, small_tensors)


class Without:
    """An object without the attribute at a path."""

    def __init__(self, real: Any, path: str) -> None:
        self._real, self._path = real, path

    def __getattr__(self, name: str) -> Any:
        first, _, rest = self._path.partition(".")
        if name != first:
            return getattr(self._real, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self._real, name), rest)


def loaded_again(module: ModuleType) -> Any:
    spec = spec_from_file_location("loaded_again", str(module.__file__))
    assert spec is not None and spec.loader is not None
    again = sys.modules["loaded_again"] = module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(again)
    return again


def is_off(module: Any) -> bool:
    """Whether the file does nothing."""
    x = torch.arange(3.0)
    if hasattr(module, "snapshot_of_tensor"):
        copied = module.snapshot_of_tensor(x)
        x.add_(1)
        assert copied.tolist() == [0, 1, 2]
        return not module.owned(x)
    if hasattr(module, "call_directly"):
        layer = nn.Linear(1, 1)
        handle = layer.register_forward_hook(lambda *_: None)
        return module.call_directly(layer, handle.id, lambda out: out) is None
    return module.SmallTensors().add(x, ("mean",), ()) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module in FILES for name in module.NAMES],
    ids=lambda it: str(it)[-40:],
)
def test_a_torch_without_a_private_name_takes_the_plain_way(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "torch", Without(torch, name))
    assert is_off(loaded_again(module))


def test_the_environment_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_off(loaded_again(module)) for module in FILES] == [not fast.IS_ON] * len(FILES)
    monkeypatch.setenv("HOOKRUN_FAST", "0")
    monkeypatch.setattr(fast, "IS_ON", loaded_again(fast).IS_ON)
    assert all(is_off(loaded_again(module)) for module in FILES)


def test_the_variable_of_the_removed_code_in_c_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_KERNELS", "0")
    with pytest.warns(hookrun.HookrunWarning, match="HOOKRUN_KERNELS has no effect"):
        loaded_again(fast)


def test_every_private_name_is_asked_for() -> None:
    """A name that a file takes from torch in another way would be missed above."""
    for path in Path(str(fast.__file__)).parent.glob("*.py"):
        assert (
            re.findall(r"torch\._C\.(?!_DisableFuncTorch)\w+|import _|torch\._(?!C)\w+", path.read_text())
            == []
        )


def results() -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(3, 4)
    hooks = {
        "kept": {"select": "*", "hook": "forward", "action": "capture"},
        "twice": {"select": "2", "hook": "forward", "action": "scale", "factor": 2},
        "seen": {"select": "1", "hook": "output_grad", "action": "capture"},
        "numbers": {"select": "*", "hook": "forward", "action": "stats"},
    }
    with hookrun.hooked(model, hooks) as installed:
        for _ in range(3):
            model(x).sum().backward()
    tensors = [tensor for hook in installed.captures.values() for found in hook.values() for tensor in found]
    return {"tensors": tensors, "records": installed.records, "fired": dict(installed.fired)}


def test_all_of_them_off_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results()
    for module in FILES:
        monkeypatch.setattr(module, "_is_usable", False)
    found = results()
    assert found["fired"] == expected["fired"]
    pairs = zip(found["tensors"], expected["tensors"], strict=True)
    assert all(isinstance(one, Tensor) and torch.equal(one, other) for one, other in pairs)
    for one, other in zip(found["records"], expected["records"], strict=True):
        for key, value in other.items():
            assert one[key] == (
                pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            ), key

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
from torch import nn

import hookrun
from hookrun.engine.runtime import fast
from hookrun.engine.runtime.fast import copies, direct_calls, small_tensors

FILES = (copies, direct_calls, small_tensors)


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
    for module in FILES:
        assert is_off(loaded_again(module))


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
    assert spec is not None
    assert spec.loader is not None
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

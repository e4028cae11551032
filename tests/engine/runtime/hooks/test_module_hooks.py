"""Hooks on modules: containers and views; each hook type has a class. Values: `semantics/test_differential.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hooking import one_hook
from small_nets import Net
from torch import nn

import hookrun
from hookrun.engine.discovery import own_subclasses
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.runtime import hooks as package
from hookrun.engine.runtime.hooks.base import RegisteredHook, registered_hooks
from hookrun.engine.runtime.hooks.exits import takes_nodes
from hookrun.errors import HookError

PACKING = nn.Sequential(Net(lambda _, x: {"a": x * 2, "b": [x * 2 + 1]}))


def test_a_missing_target_names_those_there_are() -> None:
    said = r"hook 'h' \(forward, scale\) on 0: target c: 'c' is not in the dict: .*a, b"
    spec = one_hook("0", "forward", "scale", factor=1, target="c")
    with hookrun.hooked(PACKING, spec), pytest.raises(HookError, match=said):
        PACKING(torch.ones(2))


def test_output_grad_on_a_container_fires_for_each_tensor(capsys) -> None:
    with hookrun.hooked(PACKING, one_hook("0", "output_grad", "print")) as hooks:
        out = PACKING(torch.ones(2, requires_grad=True))
        (out["a"].sum() + 2 * out["b"][0].sum()).backward()
    assert sorted(record["path"] for record in hooks.records) == ["a", "b[0]"]
    assert hooks.fired["h", "0"] == 2
    assert "h  0 a  shape=[2]" in capsys.readouterr().out


@pytest.mark.parametrize("layer", [nn.MaxPool1d(2), nn.AvgPool1d(2), nn.Flatten(), nn.InstanceNorm1d(2)])
def test_output_grad_of_a_view_survives_a_write(
    layer: nn.Module,
) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), layer, nn.ReLU(inplace=True))
    with hookrun.hooked(model, one_hook("1", "output_grad", "scale", factor=0.0)):
        model(torch.randn(4, 1, 8)).square().sum().backward()
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()


def test_leaves_get_no_nodes() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert not takes_nodes(leaf)
    assert not takes_nodes(leaf[:1])
    assert not takes_nodes(torch.ones(1))
    assert takes_nodes(leaf * 1)
    assert takes_nodes((leaf * 1)[:1])
    for each in (leaf * 1).unbind():
        assert not takes_nodes(each)


def test_each_hook_type_has_one_class() -> None:
    assert set(registered_hooks()) == set(HOOK_TYPES.values())
    named = Counter[object]()
    for item in own_subclasses(package, RegisteredHook):
        named.update(vars(item).get("hook_types", ()))
    assert {str(kind): count for kind, count in named.items() if count > 1} == {}

"""One firing: the action acts on the target's floating-point tensors only, and its errors name the hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions.user_code import UserCodeError
from hookrun.errors import HookError


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "n": torch.arange(2), "inner": (x + 1, None)}


def run(**hook: Any) -> tuple[dict[str, Any], Any]:
    model = nn.Sequential(Pair())
    with hookrun.hooked(model, {"h": {"select": "0", "hook": "forward", **hook}}) as hooks:
        return model(torch.ones(2)), hooks


def test_an_edit_changes_floating_point_members_or_the_target_only() -> None:
    out, hooks = run(action="scale", factor=3.0)
    assert out["x"].tolist() == [3, 3] and out["inner"][0].tolist() == [6, 6]
    assert out["n"].tolist() == [0, 1] and out["inner"][1] is None and hooks.fired["h", "0"] == 1
    out, _ = run(action="scale", factor=3.0, target="inner[0]")
    assert out["x"].tolist() == [1, 1] and out["inner"][0].tolist() == [6, 6]


def test_an_error_in_an_action_becomes_a_hook_error_with_its_cause() -> None:
    def wrong_shape(x: Tensor) -> Tensor:
        return x[:1]

    def fails(x: Tensor) -> Tensor:
        raise KeyError("inside")

    for function, cause in ((wrong_shape, ValueError), (fails, UserCodeError)):
        with pytest.raises(HookError, match=r"hook 'h' \(forward, .*\) on 0") as found:
            run(action="python", function=function)
        assert isinstance(found.value.__cause__, cause)

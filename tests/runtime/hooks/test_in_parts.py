"""Several pointwise edits of a large tensor are done part by part, with the result of one edit after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions.base import Action
from hookrun.runtime import in_parts as parts

EDITS: dict[str, dict[str, Any]] = {
    "a": {"action": "scale", "factor": 2.5},
    "b": {"action": "add_bias", "value": -0.1},
    "c": {"action": "clamp", "min": -1, "max": 1e6},
    "d": {"action": "scale", "factor": 0.3, "when": {"step": {"start": 1}}},
}
SPEC = {name: {"select": "0", "hook": "forward", **edit} for name, edit in EDITS.items()}
ALWAYS = {name: hook for name, hook in SPEC.items() if "when" not in hook}


def by_hand(x: Tensor, step: int) -> Tensor:
    x = (x * 2.5 + -0.1).clamp(-1, 1e6 if x.dtype is not torch.float16 else 65504)
    return x * 0.3 if step else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_result_equals_that_of_one_edit_after_the_other(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided = list[int]()

    def counted(functions: list[parts.Into], x: Tensor, *, overwrite: bool) -> Tensor:
        divided.append(len(functions))
        return parts.in_parts(functions, x, overwrite=overwrite)

    monkeypatch.setattr("hookrun.runtime.hooks.forward.in_parts", counted)
    x = torch.randn(3, 401, 999, dtype=dtype)
    x[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    before = x.clone()
    with torch.no_grad(), hookrun.hooked(model := nn.Sequential(nn.Identity()), SPEC) as hooks:
        for step in range(2):
            assert torch.equal(model(x).nan_to_num(7), by_hand(x, step).nan_to_num(7))
            hooks.step()
    assert divided == [3, 4] and torch.equal(x.nan_to_num(7), before.nan_to_num(7))
    assert [hooks.fired[name, "0"] for name in SPEC] == [2, 2, 2, 1]


def test_gradients_other_layouts_and_small_tensors_are_edited_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "SMALLEST", 10)
    with hookrun.hooked(model := nn.Sequential(nn.Identity()), ALWAYS):
        x = torch.randn(4, 5, requires_grad=True)
        model(x).sum().backward()
        mine, x.grad = x.grad, None
        by_hand(x, 0).sum().backward()
        assert mine is not None and x.grad is not None and torch.equal(mine, x.grad)
        for other in (
            torch.randn(4, 5).t(),
            torch.randn(3),
            torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        ):
            new = model(other)
            assert torch.equal(new, by_hand(other, 0)) and new.stride() == by_hand(other, 0).stride()
        mapped = torch.vmap(model)(torch.ones(8, 5))
        assert torch.equal(mapped, by_hand(torch.ones(8, 5), 0))
        assert model((torch.ones(20), 3))[1] == 3


def test_the_changes_of_each_edit_are_counted_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SMALLEST", 10)
    plan = hookrun.compile(ALWAYS, model := nn.Sequential(nn.Identity()))
    with plan.install(model, effects=True) as hooks:
        model(torch.full((20,), -5.0))
    assert hooks.effects["a", "0"] == (20, 20) and hooks.effects["c", "0"] == (20, 20)


def test_every_pointwise_edit_writes_what_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each dtype, also with a bound beyond its range, infinite or not given."""
    edits: list[dict[str, Any]] = [
        {"action": "scale", "factor": 1 / 3},
        {"action": "add_bias", "value": 0.1},
        {"action": "clamp", "min": -0.5},
        {"action": "clamp", "max": 0.5},
        {"action": "clamp", "min": float("-inf"), "max": 1e6},
        {"action": "clamp", "min": -1e39, "max": 2},
    ]

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = nn.Sequential(Doubling())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.tensor([float("nan"), float("inf"), -float("inf"), 6e4, *torch.randn(60)], dtype=dtype)
        for edit in edits:
            found = []
            for smallest in (10, 10**6):
                monkeypatch.setattr(parts, "SMALLEST", smallest)
                spec = {name: {"select": "0", "hook": "forward", **edit} for name in "ab"}
                with torch.no_grad(), hookrun.hooked(model, spec):
                    found.append(model(x))
            assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8)), (dtype, edit)


def test_an_action_without_a_method_to_write_is_written_too() -> None:
    class Negative(Action):
        action_name = "negative"

        def build(self, site: Any) -> Any:
            return lambda x: -x

    x = torch.randn(5)
    out, wanted = torch.empty(5), -x
    Negative().build_into(None)(x, out)  # type: ignore[arg-type]
    assert torch.equal(out, wanted)
    Negative().build_into(None)(x, x)  # type: ignore[arg-type]
    assert torch.equal(x, wanted)

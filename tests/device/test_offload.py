"""Saved tensors that leave the device come back unchanged, and take none of its memory meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5))]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_the_device_holds_less_between_the_passes(to: str, device: torch.device) -> None:
    memory = torch.get_device_module(device)
    x = torch.randn(512, 64).to(device)
    hooks = {"away": {"select": "*", "hook": "saved_tensors", "action": "offload", "to": to}}

    def passes(hooks: dict[str, dict[str, str]]) -> tuple[list[torch.Tensor], int]:
        model = network().to(device)
        torch.manual_seed(1)
        before = memory.memory_allocated()
        with hookrun.hooked(model, hooks):
            loss = model(x).square().mean()
            held = memory.memory_allocated() - before
            return gradients(model, loss), held

    expected, whole = passes({})
    found, left = passes(hooks)
    assert all(map(torch.equal, found, expected))
    assert left < whole / 10, (left, whole)  # the last copy may be under way


@pytest.mark.parametrize(
    "action", [{"action": "offload", "to": "cpu"}, {"action": "cast", "dtype": "bfloat16"}]
)
def test_a_part_of_a_saved_tensor_is_refused_early(action: dict[str, str], device: torch.device) -> None:
    hooks = {"away": {"select": "0", "hook": "saved_tensors", **action, "index": "..., 0:2"}}
    with pytest.raises(hookrun.CompileError, match="packs the whole tensor"):
        hookrun.compile({"hooks": hooks}, network().to(device))

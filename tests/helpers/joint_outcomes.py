"""What a hook of the joint table does to a small training on a device, to compare with the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.engine.values.containers import leaves

STEPS = 3


def trained(
    model: nn.Module, spec: Mapping[str, Any], device: torch.device | str, *, steps: int = STEPS
) -> dict[str, Any]:
    """Train a model of inputs [B, 8] on the device; returns everything that can be seen of it, on the CPU."""
    model = model.to(device)
    outputs = list[Tensor]()
    with hookrun.hooked(model, {"hooks": spec}, effects=True) as hooks:
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
        for step in range(steps):
            hooks.samples = torch.arange(5)
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(device).requires_grad_()
            output = model(x)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(output.detach().cpu())
            hooks.step()
        return {
            "outputs": outputs,
            "weights": {name: each.detach().cpu() for name, each in model.named_parameters()},
            "captures": tensors_of(hooks.captures),
            "records": [dict(record) for record in hooks.records],
            "fired": dict(hooks.fired),
            "changed": [float(site.changed) for site in hooks.sites],
        }


def tensors_of(value: Any) -> dict[str, Tensor]:
    """Path -> each tensor in a container, on the CPU."""
    return {path: each.detach().cpu() for path, each in leaves(value) if isinstance(each, Tensor)}


def assert_equal(found: Any, expected: Any, *, tolerance: float = 1e-5, where: str = "") -> None:
    """AssertionError with the place of the first difference; floats are compared up to rounding."""
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal(found[key], value, tolerance=tolerance, where=f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_equal(found[number], value, tolerance=tolerance, where=f"{where}[{number}]")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(
            found,
            expected,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{where}: {text}",
        )
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance * 10, abs=tolerance, nan_ok=True), where
    else:
        assert found == expected, where


def refusal(spec: Mapping[str, Any], model: nn.Module) -> str | None:
    """Why `compile` refuses the hooks of this model, or None."""
    try:
        hookrun.compile({"hooks": spec}, model)
    except hookrun.CompileError as error:
        return str(error)
    return None

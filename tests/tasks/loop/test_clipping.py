"""Gradients are clipped over all parameters together, and the norm before clipping is returned."""

from __future__ import annotations

import pytest
import torch

from hookrun.spec.experiment import Train
from hookrun.tasks.loop.clipping import clip


def optimizer() -> torch.optim.SGD:
    """Two groups, whose gradients 3 and 4 have the norm 5, and a parameter without a gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, value in zip(parameters, (3.0, -4.0), strict=False):
        parameter.grad = torch.tensor([value])
    return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1)


def test_clipping_is_over_all_groups_and_returns_the_norm_before() -> None:
    for settings, expected in (
        ({"clip_grad_norm": 1.0}, [0.6, -0.8]),
        ({"clip_grad_value": 3.5}, [3.0, -3.5]),
        ({}, [3.0, -4.0]),
    ):
        made = optimizer()
        norm = clip(Train(**settings), made)
        found = [p.grad.item() for group in made.param_groups for p in group["params"] if p.grad is not None]
        assert found == pytest.approx(expected, abs=1e-5), settings
        assert (norm is None) == (not settings), settings
        assert norm is None or norm.item() == pytest.approx(5), settings

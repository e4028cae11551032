"""`grad` sees each micro-batch, `post_accumulate_grad` their sum, once per step."""

from __future__ import annotations

import torch
from torch import nn

import hookrun


def test_grad_is_edited_before_it_is_added_and_the_sum_afterwards() -> None:
    for hook, expected in (("grad", [10.0, 20.0]), ("post_accumulate_grad", [10.0, 110.0])):
        model = nn.Linear(1, 1, bias=False)
        spec = {"h": {"select": "weight", "hook": hook, "action": "scale", "factor": 10.0}}
        found = list[float]()
        with hookrun.hooked(model, spec):
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()
                assert model.weight.grad is not None
                found.append(model.weight.grad.item())
        assert found == expected, hook

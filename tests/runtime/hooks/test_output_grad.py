"""The gradient of an output is edited once, before the module's backward, also if others use the module's input."""

from __future__ import annotations

import torch
from torch import nn

import hookrun


def test_an_output_s_gradient_is_edited_on_the_way_into_the_module_only() -> None:
    spec = {"h": {"select": "0", "hook": "output_grad", "action": "scale", "factor": 10.0}}
    for module in (nn.Identity(), nn.ReLU(inplace=True), nn.ReLU()):
        model, x = nn.Sequential(module), torch.ones(2, requires_grad=True)
        with hookrun.hooked(model, spec) as hooks:
            y = x * 1
            (model(y if type(module) is nn.Identity else y.clone()) + 3 * y).sum().backward()
            assert hooks.fired["h", "0"] == 1, module
        assert x.grad is not None and x.grad.tolist() == [13] * 2, module

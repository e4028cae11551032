"""Parameters that hooks added are recorded on the module, also in a copy, until they are removed."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hookrun.actions.base import add_parameter, remove_parameter, was_added


def test_an_added_parameter_is_distinguished_from_the_module_s_own() -> None:
    module = nn.Linear(1, 1)
    before = set(vars(module))
    add_parameter(module, "shift", nn.Parameter(torch.zeros(1)))
    for each in (module, copy.deepcopy(module)):
        assert was_added(each, "shift") and not was_added(each, "weight")
    remove_parameter(module, "shift")
    assert not was_added(module, "shift") and "shift" not in dict(module.named_parameters())
    assert set(vars(module)) == before

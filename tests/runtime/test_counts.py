"""Counts are found under every name of a module, and inactive hooks are reported one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookrun
from hookrun.runtime.counts import describe_inactive


def test_a_shared_module_s_count_is_found_under_each_of_its_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared)
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}}
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(1, 2))
        fired = hooks.fired
    assert fired["h", "0"] == fired["h", "1"] == 2
    with pytest.raises(KeyError):
        fired["h", "2"]


def test_describe_inactive_is_one_line_for_each_hook() -> None:
    lines = describe_inactive([("a", "x", "never fired"), ("a", "", "never fired"), ("b", "y", "no tensor")])
    assert lines == ["a never fired on x, (root)", "b no tensor on y"]

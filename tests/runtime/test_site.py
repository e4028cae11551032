"""A site provides what an action declares, for the firing of its own thread."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.errors import HookError
from hookrun.runtime.clock import Clock, CurrentCall


def test_a_record_begins_with_hook_module_and_step() -> None:
    model = nn.Sequential(nn.Identity()).eval()
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats", "of": "sum"}}
    with hookrun.hooked(model, spec) as hooks:
        hooks.step()
        model({"a": torch.ones(3)})
    assert hooks.records == [
        {
            **{"hook": "s", "module": "0", "path": hooks.records[0]["path"], "action": "stats"},
            **{"mode": "eval", "epoch": 0, "step": 1, "call": 0, "sum": 3.0},
        }
    ]
    assert "a" in hooks.records[0]["path"]


def test_threads_do_not_see_each_other_s_firing() -> None:
    state, seen = CurrentCall("", Clock(nn.Identity())), list[str]()
    state.at = "[0]"
    thread = Thread(target=lambda: seen.append(state.at))
    thread.start()
    thread.join()
    assert seen == [""] and state.at == "[0]"


def test_keys_of_cross_attention_belong_to_the_encoder_s_tokens() -> None:
    current: Any = SimpleNamespace(encoder="of the encoder")
    clock: Any = Clock(nn.Identity())
    for path, expected in (
        ("decoder.0.encoder_attn.k_proj", "of the encoder"),
        ("decoder.0.encoder_attn.q_proj", current),
        ("0.attn.k_proj", current),
    ):
        now, clock.passes = CurrentCall(path, clock), None
        assert now.tokens is None, path
        clock.passes = SimpleNamespace(current=current)
        assert now.tokens == expected and now.model_tokens is current, path


def test_a_complex_value_of_a_real_tensor_is_refused() -> None:
    value = torch.ones(2, dtype=torch.complex64)
    for given in (value, lambda x: x * 1j):
        spec = {"h": {"select": "", "hook": "forward", "action": "scale", "factor": given}}
        model = nn.Identity()
        with hookrun.hooked(model, spec), pytest.raises(HookError, match=r"'h' .* the value is complex"):
            model(torch.ones(2))

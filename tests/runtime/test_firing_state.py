"""The state of a firing is separate for each thread; cross-attention keys belong to the encoder's tokens."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

from torch import nn

from hookrun.runtime.clock import Clock
from hookrun.runtime.firing_state import FiringState, TokensNow


def test_threads_do_not_see_each_other_s_firing() -> None:
    state, seen = FiringState(), list[str]()
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
        now, clock.passes = TokensNow(path, FiringState(), clock), None
        assert now.current is None, path
        clock.passes = SimpleNamespace(current=current)
        assert now.current == expected and now.model_pass is current, path

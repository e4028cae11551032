"""How many attention heads a module has: as given, or from the module, a parent or the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from hookrun.plan.plan import HeadCount
from hookrun.plan.resolve import head_count
from hookrun.spec.heads import Heads

PICK = Heads(pick=(0,))


def model(**config: Any) -> nn.Module:
    made = nn.Module()
    made.add_module("attn", nn.Sequential(nn.Linear(1, 1)))
    made.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return made


def test_a_given_count_comes_first() -> None:
    assert head_count(model(n_head=4), "attn.0", Heads(pick=(0,), count=3)) == HeadCount((3,))


def test_heads_key_heads_and_width_come_from_the_configuration() -> None:
    llama = model(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert head_count(llama, "attn.0", PICK) == HeadCount((8, 2), 8)
    assert head_count(model(n_head=4, n_embd=10), "attn.0", PICK) == HeadCount((4,), None)
    assert head_count(model(num_heads=4, d_kv=5, d_model=8), "attn.0", PICK) == HeadCount((4,), 5)


def test_the_nearest_module_with_a_count_is_used() -> None:
    made = model(n_head=4)
    made.get_submodule("attn").num_heads = 2  # type: ignore[assignment]
    assert head_count(made, "attn.0", PICK) == HeadCount((2,))
    assert head_count(made, "", PICK) == HeadCount((4,))


def test_attributes_that_are_not_counts_are_ignored() -> None:
    for wrong in (True, 0, -1, "4", None):
        assert head_count(model(n_head=wrong), "attn.0", PICK) is None

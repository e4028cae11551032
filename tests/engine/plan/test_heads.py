"""How many heads a module has, and where the last dimension of a value holds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

import hookrun
from hookrun.engine.plan.heads import head_count, last_dimension_holds_heads
from hookrun.engine.plan.plan import HeadCount
from hookrun.engine.spec.heads import Heads
from hookrun.errors import HookError

PICK = Heads(pick=(0,))


def with_config(**config: Any) -> nn.Module:
    made = nn.Module()
    made.add_module("attn", nn.Sequential(nn.Linear(1, 1)))
    made.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return made


def test_a_given_count_of_heads_comes_first() -> None:
    assert head_count(with_config(n_head=4), "attn.0", Heads(pick=(0,), count=3)) == HeadCount((3,))


def test_numbers_of_heads_come_from_the_configuration() -> None:
    llama = with_config(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert head_count(llama, "attn.0", PICK) == HeadCount((8, 2), 8)
    assert head_count(with_config(n_head=4, n_embd=10), "attn.0", PICK) == HeadCount((4,), None)
    assert head_count(with_config(num_heads=4, d_kv=5, d_model=8), "attn.0", PICK) == HeadCount((4,), 5)


def test_the_nearest_module_with_a_count_of_heads_is_used() -> None:
    made = with_config(n_head=4)
    made.get_submodule("attn").num_heads = 2  # type: ignore[assignment]
    assert head_count(made, "attn.0", PICK) == HeadCount((2,))
    assert head_count(made, "", PICK) == HeadCount((4,))


def test_attributes_that_are_not_counts_of_heads_are_ignored() -> None:
    for wrong in (True, 0, -1, "4", None):
        assert head_count(with_config(n_head=wrong), "attn.0", PICK) is None


def holding(model: nn.Module, *, of_input: bool) -> set[str]:
    """The paths, without those of later layers."""
    return {
        path
        for path, _ in model.named_modules()
        if ".1." not in path and last_dimension_holds_heads(model, path, of_input=of_input)
    }


class Wrapped(nn.Linear):
    """A projection with an adapter in it, as LoRA makes it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.base_layer, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)


class Mixing(nn.Module):
    """Attention with names that other people use."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.Wq, self.to_k, self.value = nn.Linear(8, 8), Wrapped(), nn.Linear(8, 8)
        self.norm, self.k_norm, self.mixed = nn.LayerNorm(8), nn.LayerNorm(8), nn.Identity()
        self.dropout, self.to_out = nn.Dropout(), Wrapped()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.to_out(self.mixed(self.Wq(self.norm(x)))))
        return out


def test_heads_of_own_modules_have_usual_names() -> None:
    made = nn.Sequential()
    made.add_module("mix", Mixing())
    outputs = ("Wq", "to_k", "to_k.base_layer", "to_k.adapter", "value", "k_norm", "mixed")
    assert holding(made, of_input=False) == {f"mix.{name}" for name in outputs}
    inputs = ("k_norm", "mixed", "to_out", "to_out.base_layer", "to_out.adapter")
    assert holding(made, of_input=True) == {f"mix.{name}" for name in inputs}
    fused = nn.ModuleDict({"qkv": nn.Linear(8, 24), "z": nn.Identity()})
    assert "0.z" in holding(nn.Sequential(fused), of_input=False)
    x = nn.Parameter(nn.Linear(8, 3).weight.detach())
    for select, kind in (
        ("mix.to_out", "forward"),
        ("mix.norm", "forward"),
        ("mix", "forward"),
        ("mix.Wq", "backward"),
    ):
        hook = {"select": select, "hook": kind, "action": "stats", "heads": 1}
        with hookrun.hooked(made, {"h": hook}), pytest.raises(HookError) as error:
            made(x).sum().backward()
        for part in (f"on {select}: heads:", "`hook: forward_pre`", "the point z"):
            assert part in str(error.value)
        with hookrun.hooked(made, {"h": {**hook, "heads": {"count": 2, "pick": 1}}}) as hooks:
            made(x).sum().backward()
        assert hooks.fired["h", select] == 1

"""`heads`, `index` and `tokens` of one hook are one part: the heads, what the index leaves of them, its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import normal
from torch import nn

import hookrun
from hookrun.runtime.part import TensorPart
from hookrun.runtime.parts import part_of
from hookrun.runtime.tokens.calls import CallTokens
from hookrun.runtime.tokens.passes import Pass


class Attention(nn.Module):
    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()


def part(action: str = "capture", **keys: Any) -> TensorPart | None:
    """The part at the heads of a batch of two prompts, of four tokens and, padded on the left, of two."""
    given = {"factor": 2} if action == "scale" else {}
    hook = {"select": "out", "hook": "forward", "action": action, **given, **keys}
    (planned,) = hookrun.compile({"h": hook}, Attention()).hooks
    of = Pass(
        CallTokens(2, 4),
        **{"real": torch.tensor([[True] * 4, [False, False, True, True]]), "ids": None, "prompt": 4},
        **{"new_from": 0, "number": 0, "session": None, "spans": {}, "by_hand": False},
    )
    now: Any = SimpleNamespace(current=of, samples=None, note=lambda chosen: None)
    return part_of(planned, "out", now)


def test_without_a_clause_there_is_no_part() -> None:
    assert part() is None


def test_the_three_are_taken_one_within_the_other_and_put_back_alone() -> None:
    x = normal(2, 4, 8)  # four heads of width 2
    whole = part(heads=[1, 3], index="..., 1:", tokens=0)
    assert whole is not None
    apart = x.unflatten(-1, (4, 2))
    assert torch.equal(whole.of(x), torch.stack([apart[0, 0], apart[1, 2]])[:, [1, 3], 1:])
    expected = apart.clone()
    expected[0, 0, [1, 3], 1:] = expected[1, 2, [1, 3], 1:] = 7.0
    before = x.clone()
    assert torch.equal(whole.put(x, torch.tensor(7.0)), expected.flatten(2)) and torch.equal(x, before)


def test_heads_are_not_sought_in_the_dimension_of_the_tokens() -> None:
    x = normal(2, 4, 4, 5)
    whole, of_tokens = part(heads=2), part(heads=2, tokens={"position": 0, "dim": 2})
    assert whole is not None and of_tokens is not None
    with pytest.raises(ValueError, match="could all be the head dimension"):
        whole.of(x)
    assert torch.equal(of_tokens.of(x), torch.stack([x[0, [2], 0], x[1, [2], 2]]))


def test_samples_must_stay_in_order_where_they_are_captured_and_may_change_places_in_an_edit() -> None:
    x = normal(2, 4, 8)
    captured, edited = part(index="[1, 0]"), part("scale", index="[1, 0]")
    assert captured is not None and edited is not None
    with pytest.raises(IndexError, match="out of order"):
        captured.of(x)
    assert torch.equal(edited.of(x), x.flip(0))

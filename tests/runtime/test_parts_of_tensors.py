"""The part of a tensor that `index`, `heads` and `tokens` select together is read and written back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import normal
from pydantic import TypeAdapter
from torch import Tensor, nn

import hookrun
from hookrun.plan.plan import HeadCount
from hookrun.runtime.part import HeadsPart, Part, TensorPart, TokensPart, part_of
from hookrun.runtime.tokens.calls import CallTokens, Pass
from hookrun.runtime.tokens.choice import Chosen, Rule
from hookrun.spec.heads import Heads
from hookrun.spec.tokens import Tokens
from hookrun.values.index import Index, Item

X = torch.arange(24.0).reshape(2, 3, 4)


def part(*items: Item, in_order: bool = False) -> Part:
    return Part(Index(str(items), items), in_order=in_order)


def test_writing_a_part_changes_nothing_else() -> None:
    for items in ((..., (0, -1)), (slice(None), 1), (0,), (slice(None), (2, 0), slice(1, 3))):
        of = part(*items)
        plain = tuple(list(item) if isinstance(item, tuple) else item for item in items)
        expected = X.clone()
        expected[plain] = -1.0
        before = X.clone()
        assert torch.equal(of.of(X), X[plain]), items
        assert torch.equal(of.put(X, torch.full_like(of.of(X), -1)), expected), items
        assert torch.equal(X, before)


def test_missing_repeated_and_unordered_positions_are_refused() -> None:
    for of, said in (
        (part(..., (0, 4)), "index 4 is out of bounds for dimension 2 with size 4"),
        (part(..., (1, -3)), "selects a position of dimension 2 twice"),
        (part((1, 0), in_order=True), "out of order"),
        (part(slice(2, 5)), r"selects nothing of a tensor of shape \[2, 3, 4\]"),
    ):
        with pytest.raises(IndexError, match=said):
            of.of(X)
    assert torch.equal(part((1, 0)).of(X), X.flip(0))


def test_samples_are_known_if_the_first_dimension_is_complete() -> None:
    for items, kept in (((..., 0), True), ((slice(None), 1), True), ((0,), False), (((0, 1),), False)):
        assert part(*items).leaves((0,), 3) is kept, items
    assert not part(..., 0).leaves((0,), 1)
    assert part(..., 0).leaves((0, 1), 3) and not part(..., 0).leaves((-1,), 3)


class Attention(nn.Module):
    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()


def part_at(action: str = "capture", **keys: Any) -> TensorPart | None:
    """The part at the heads of a batch of two prompts, of four tokens and, padded on the left, of two."""
    given = {"factor": 2} if action == "scale" else {}
    hook = {"select": "out", "hook": "forward", "action": action, **given, **keys}
    (planned,) = hookrun.compile({"h": hook}, Attention()).hooks
    of = Pass(
        CallTokens(2, 4),
        **{"real": torch.tensor([[True] * 4, [False, False, True, True]]), "ids": None, "prompt": 4},
        **{"new_from": 0, "number": 0, "session": None, "spans": {}, "by_hand": False},
    )
    now: Any = SimpleNamespace(tokens=of, clock=SimpleNamespace(samples=None))
    return part_of(planned, "out", now)


def test_the_three_are_taken_one_within_the_other_and_put_back_alone() -> None:
    x = normal(2, 4, 8)  # four heads of width 2
    whole = part_at(heads=[1, 3], index="..., 1:", tokens=0)
    assert whole is not None
    apart = x.unflatten(-1, (4, 2))
    assert torch.equal(whole.of(x), torch.stack([apart[0, 0], apart[1, 2]])[:, [1, 3], 1:])
    expected = apart.clone()
    expected[0, 0, [1, 3], 1:] = expected[1, 2, [1, 3], 1:] = 7.0
    before = x.clone()
    assert torch.equal(whole.put(x, torch.tensor(7.0)), expected.flatten(2)) and torch.equal(x, before)


def test_samples_must_stay_in_order_where_they_are_captured_and_may_change_places_in_an_edit() -> None:
    x = normal(2, 4, 8)
    captured, edited = part_at(index="[1, 0]"), part_at("scale", index="[1, 0]")
    assert captured is not None and edited is not None
    with pytest.raises(IndexError, match="out of order"):
        captured.of(x)
    assert torch.equal(edited.of(x), x.flip(0))


def heads(*pick: int, count: int = 4, not_dim: int = -1) -> HeadsPart:
    return HeadsPart(Heads.model_validate({"pick": list(pick)}), HeadCount((count,)), not_dim)


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_a_tensor_whose_heads_cannot_be_found_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dimensions \[1, 2\] .* could all be the head dimension"):
        heads(0).of(numbers(2, 4, 4, 5))
    assert heads(0, not_dim=2).of(numbers(2, 4, 4, 5)).shape == (2, 1, 4, 5)
    with pytest.raises(ValueError, match="does not hold 4 heads"):
        heads(0).of(numbers(2, 3, 7))
    grouped = HeadsPart(Heads.model_validate({"pick": [3]}), HeadCount((4, 2), 8), -1)
    assert grouped.of(numbers(1, 4, 5, 8)).shape == (1, 1, 5, 8)
    for keys in (numbers(1, 2, 5, 8), numbers(1, 5, 16)):
        with pytest.raises(ValueError, match="there is no head 3 among 2"):
            grouped.of(keys)


REAL = torch.tensor([[False, True, True], [True, True, True]])


class Now:
    """The call of a batch of two prompts, padded on the left."""

    clock = SimpleNamespace(samples=None)
    chosen: Chosen

    def __init__(self, **fields: Any) -> None:
        said = {"real": REAL, "ids": None, "prompt": 3, "new_from": 0, "number": 0, "session": None}
        self.tokens: Pass | None = Pass(CallTokens(2, 3), **{**said, **fields}, spans={}, by_hand=False)


def tokens(clause: Any, now: Any) -> TokensPart:
    given = clause if isinstance(clause, dict) else {"position": clause}
    return TokensPart(Rule(TypeAdapter(Tokens).validate_python(given), False, {}), now)


def test_rows_are_copies_and_go_back_to_their_places_alone() -> None:
    middle, pattern = normal(2, 4, 3), normal(2, 5, 3, 3, seed=1)
    for clause, x, places in (
        (0, normal(2, 3, 4), [(0, 1), (1, 0)]),
        ({"position": 0, "dim": 2}, middle, [(0, slice(None), 1), (1, slice(None), 0)]),
        ({"query": -1, "key": 0}, pattern, [(0, slice(None), 2, 1), (1, slice(None), 2, 0)]),
        ({"key": 0}, pattern, [(0, ..., 1), (1, ..., 0)]),
    ):
        part, before = tokens(clause, Now()), x.clone()
        rows = part.of(x)
        assert torch.equal(rows, torch.stack([x[place] for place in places])), clause
        expected = x.clone()
        for place in places:
            expected[place] = -1.0
        assert torch.equal(part.put(x, torch.full_like(rows, -1.0)), expected), clause
        rows.zero_()
        assert torch.equal(x, before), clause


def test_a_pass_without_such_a_token_has_nothing_to_act_on() -> None:
    x, now = normal(2, 3, 4), Now()
    assert tokens({"phase": "generation"}, now).nothing_of(x) and not tokens(0, now).nothing_of(x)
    assert tokens({"phase": "generation"}, now).of(x).shape == (0, 4)


def test_a_firing_chooses_once_for_each_shape_and_notes_the_places_each_time() -> None:
    now, x = Now(), normal(2, 3, 4)
    part = tokens(-1, now)
    first = part.chosen(x)
    assert part.chosen(x + 1) is first and now.chosen is first and len(part.chosen(x[..., :2])) == 2
    now.tokens = Now(real=torch.ones_like(REAL)).tokens
    assert part.chosen(x) is not first, "of another call"


def test_parts_of_one_pass_choose_for_themselves_also_if_an_earlier_one_is_gone() -> None:
    x, now = normal(2, 3, 4), Now()
    for number in range(40):  # Python gives a new object the place of the one just deleted
        position = -(1 + number % 2)
        assert torch.equal(tokens(position, now).of(x), x[:, position]), number


def test_what_does_not_fit_the_call_is_refused() -> None:
    nowhere: Any = SimpleNamespace(tokens=None)
    for clause, now, x, said in (
        (0, nowhere, normal(2, 3), "it is not known which tokens the call computes"),
        ({"position": 0, "dim": 2}, Now(), normal(2, 3), r"shape \[2, 3\] does not have a dimension 2"),
        ({"query": 0}, Now(), normal(2, 3), "last two dimensions of an attention pattern"),
        (0, Now(), normal(4, 3), "a row for each of the 2 sequences"),
        (0, Now(), normal(2, 5), "the dimension has size 5 and the call 3 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            tokens(clause, now).of(x)

"""The selected tokens of a tensor are rows [N, ...], and go back to their places in a copy of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import normal
from pydantic import TypeAdapter

from hookrun.index import Index, Item
from hookrun.runtime.part import Part
from hookrun.runtime.tokens.calls import CallTokens
from hookrun.runtime.tokens.choice import Chosen, Rule
from hookrun.runtime.tokens.part import Indexed, TokensPart
from hookrun.runtime.tokens.passes import Pass
from hookrun.spec.tokens import Tokens

REAL = torch.tensor([[False, True, True], [True, True, True]])


class Now:
    """The pass of a batch of two prompts, padded on the left, and what is noted of it."""

    samples = None

    def __init__(self, **fields: Any) -> None:
        said = {"real": REAL, "ids": None, "prompt": 3, "new_from": 0, "number": 0, "session": None}
        self.current: Pass | None = Pass(CallTokens(2, 3), **{**said, **fields}, spans={}, by_hand=False)
        self.noted = list[Chosen]()

    def note(self, chosen: Chosen) -> None:
        self.noted.append(chosen)


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


def test_a_firing_chooses_once_for_each_shape_and_notes_the_places_each_time() -> None:
    now, x = Now(), normal(2, 3, 4)
    part = tokens(-1, now)
    first = part.chosen(x)
    assert part.chosen(x + 1) is first and len(part.chosen(x[..., :2])) == 2
    assert len(now.noted) == 3 and now.noted[1] is first
    of_call = now.current
    now.current = Now(real=torch.ones_like(REAL)).current
    assert part.chosen(x) is not first and now.current is not of_call, "of another call"


def test_a_pass_without_such_a_token_has_nothing_to_act_on() -> None:
    x, now = normal(2, 3, 4), Now()
    assert tokens({"phase": "generation"}, now).nothing_of(x) and not tokens(0, now).nothing_of(x)
    assert tokens({"phase": "generation"}, now).of(x).shape == (0, 4)
    assert not tokens(0, now).keeps_samples(3)


def test_parts_of_one_pass_choose_for_themselves_also_if_an_earlier_one_is_gone() -> None:
    x, now = normal(2, 3, 4), Now()
    for number in range(40):  # Python gives a new object the place of the one just deleted
        position = -(1 + number % 2)
        assert torch.equal(tokens(position, now).of(x), x[:, position]), number


def test_what_does_not_fit_the_call_is_refused() -> None:
    nowhere: Any = SimpleNamespace(current=None)
    for clause, now, x, said in (
        (0, nowhere, normal(2, 3), "it is not known which tokens the call computes"),
        ({"position": 0, "dim": 2}, Now(), normal(2, 3), r"shape \[2, 3\] does not have a dimension 2"),
        ({"query": 0}, Now(), normal(2, 3), "last two dimensions of an attention pattern"),
        (0, Now(), normal(4, 3), "a row for each of the 2 sequences"),
        (0, Now(), normal(2, 5), "the dimension has size 5 and the call 3 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            tokens(clause, now).of(x)


def test_an_index_before_the_tokens_leaves_samples_and_positions_whole() -> None:
    def indexed(clause: Any, *items: Item) -> Indexed:
        return Indexed(Part(Index(str(items), items)), tokens(clause, Now()))

    x = normal(2, 3, 4)
    part = indexed(0, ..., slice(1, 3))
    assert torch.equal(part.of(x), x[..., 1:3]) and part.keeps_samples(3) and not part.nothing_of(x)
    assert torch.equal(part.put(x, torch.zeros(2, 3, 2))[..., 1:3], torch.zeros(2, 3, 2))
    for clause, items in ((0, (0,)), (0, (slice(None), 1)), ({"key": 0}, (..., 0))):
        with pytest.raises(ValueError, match="`index` picks samples or positions"):
            indexed(clause, *items).of(x)

"""A clause selects columns of a pass: of real tokens only, each row with its sample, position and token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from hookrun.runtime.tokens.calls import CallTokens, Pass
from hookrun.runtime.tokens.choice import Chosen, Rule
from hookrun.spec.tokens import Tokens

REAL = torch.tensor([[False, True, True], [True, True, True]])
IDS = torch.tensor([[0, 5, 6], [5, 8, 9]])


def choose(clause: Any, size: int = 3) -> Chosen:
    of = Pass(
        CallTokens(2, 3, IDS),
        **{"real": REAL, "ids": IDS, "prompt": 3, "new_from": 0, "number": 0, "session": None},
        **{"spans": {}, "by_hand": False},
    )
    return Rule(TypeAdapter(Tokens).validate_python(clause), True, {}).choose(
        of, (size,), torch.tensor([7, 3])
    )


def test_positions_and_ids_are_found_after_the_padding() -> None:
    for clause, places in (
        ({"position": 0}, [(0, 1), (1, 0)]),
        ({"position": -1}, [(0, 2), (1, 2)]),
        ({"id": 5}, [(0, 1), (1, 0)]),
        ({"position": "1:", "missing": "skip"}, [(0, 2), (1, 1), (1, 2)]),
    ):
        chosen = choose(clause)
        sequences, columns = (each.tolist() for each in chosen.on(torch.device("cpu")))
        assert list(zip(sequences, columns, strict=True)) == places, clause
        rows = chosen.rows
        assert rows.numbers.tolist() == [(7, 3)[row] for row, _ in places], clause
        assert rows.token_ids.tolist() == [int(IDS[place]) for place in places], clause


def test_a_position_that_a_sample_lacks_and_a_tensor_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError):
        choose({"position": 2})
    assert len(choose({"position": 2, "missing": "skip"})) == 1
    with pytest.raises(ValueError, match="4"):
        choose({"position": 0}, size=4)

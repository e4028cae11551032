"""A pass counts positions from the first real token, and ends a sequence at its end-of-text token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hookrun.runtime.tokens.calls import CallTokens, Pass


def of(real: Tensor, **fields: Any) -> Pass:
    rows, columns = real.shape
    said = {"ids": None, "prompt": columns, "new_from": 0, "number": 0, "session": None}
    return Pass(CallTokens(rows, columns), real=real, spans={}, by_hand=False, **{**said, **fields})


def test_positions_begin_at_the_first_real_token() -> None:
    left = torch.tensor([[False, True, True], [True, True, True]])
    found = of(left)
    assert found.positions.tolist() == [[-1, 0, 1], [0, 1, 2]] and found.first
    assert not of(left, prompt=2, new_from=2).first


def test_rows_belong_to_the_samples_in_order_or_are_refused() -> None:
    four = torch.ones(4, 2, dtype=torch.bool)
    assert of(four).samples_of_rows(None).tolist() == [0, 1, 2, 3]
    beams = of(four)
    beams.goes_on = True
    assert beams.samples_of_rows(2).tolist() == [0, 0, 1, 1]
    for found, count in ((of(four), 2), (beams, 3), (beams, 0)):
        with pytest.raises(ValueError, match=f"4 sequences and the batch {count} samples"):
            found.samples_of_rows(count)


def test_an_encoder_s_pass_has_a_row_for_each_of_the_decoder_s() -> None:
    encoder = of(torch.tensor([[True, False], [True, True]]), ids=torch.tensor([[1, 0], [2, 3]]))
    seen = encoder.seen_by(of(torch.ones(4, 1, dtype=torch.bool)))
    assert seen.rows == 4 and seen.ids is not None and seen.ids[:, 0].tolist() == [1, 1, 2, 2]
    assert seen.real[:, 1].tolist() == [False, False, True, True] and encoder.rows == 2

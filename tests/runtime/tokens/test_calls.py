"""What the arguments of a call say of its tokens, and whose samples its rows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookrun.runtime.tokens.calls import CallReader, CallTokens, Pass, as_mask, labelled, made_from_labels
from hookrun.runtime.tokens.sequences import Sequences

IDS, MASK = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])


class Model(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        return input_ids


def test_ids_and_mask_are_read_by_position_and_by_name_as_copies() -> None:
    reader = CallReader(Model())
    for args, kwargs in (((IDS, MASK), {}), ((), {"input_ids": IDS, "attention_mask": MASK})):
        told = reader.read(args, kwargs)
        assert told is not None and (told.rows, told.columns, told.past) == (2, 3, None)
        assert told.ids is not None and torch.equal(told.ids, IDS)
        assert told.ids.data_ptr() != IDS.data_ptr()
        assert told.mask is not None and torch.equal(told.mask, MASK.bool())
    assert reader.read((), {"pixel_values": torch.zeros(2, 3)}) is None


def test_a_mask_wider_than_the_ids_says_how_much_a_cache_holds() -> None:
    wide = torch.ones(2, 5, dtype=torch.int64)
    told = CallReader(Model()).read((IDS, wide), {})
    assert told is not None and told.past == 2 and CallTokens.of(IDS, wide).past == 2
    assert CallTokens.of(IDS, MASK).past is None


def test_tensors_without_data_give_shapes_only() -> None:
    told = CallReader(Model()).read((IDS.to("meta"),), {})
    assert told is not None and not told.has_data and told.ids is None and told.columns == 3


def test_labels_say_which_decoder_tokens_are_real_unless_the_call_says_it() -> None:
    labels = torch.tensor([[4, -100]])
    found = labelled(nn.Identity(), (), {"labels": labels})
    assert found is not None and found.tolist() == [[True, False]]
    assert labelled(nn.Identity(), (), {"labels": labels, "decoder_input_ids": labels}) is None
    assert made_from_labels(nn.Sequential(Model())) is None


def test_a_token_is_real_if_any_query_attends_to_it() -> None:
    blocks = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]).tril().bool()[None, None]
    least = torch.finfo(torch.float32).min
    biased = torch.where(blocks, torch.arange(-4.0, 0), least)
    for mask in (blocks, blocks.long(), torch.where(blocks, 0.0, -torch.inf), biased):
        found = as_mask(mask, 2, 4)
        assert found is not None and found.tolist() == [[True, True, False, True]] * 2
    assert as_mask(blocks, 1, 9) is None  # of the sliding window of a cache


def of(real: Tensor, **fields: Any) -> Pass:
    rows, columns = real.shape
    said = {"ids": None, "prompt": columns, "new_from": 0, "number": 0, "session": None}
    return Pass(CallTokens(rows, columns), real=real, spans={}, by_hand=False, **{**said, **fields})


def test_positions_begin_at_the_first_real_token() -> None:
    left = torch.tensor([[False, True, True], [True, True, True]])
    found = of(left)
    assert found.positions.tolist() == [[-1, 0, 1], [0, 1, 2]] and found.first
    assert not of(left, prompt=2, new_from=2).first


def test_an_encoder_s_pass_has_a_row_for_each_of_the_decoder_s() -> None:
    encoder = of(torch.tensor([[True, False], [True, True]]), ids=torch.tensor([[1, 0], [2, 3]]))
    seen = encoder.seen_by(of(torch.ones(4, 1, dtype=torch.bool)))
    assert seen.rows == 4 and seen.ids is not None and seen.ids[:, 0].tolist() == [1, 1, 2, 2]
    assert seen.real[:, 1].tolist() == [False, False, True, True] and encoder.rows == 2


def test_a_call_is_a_pass_until_it_ends() -> None:
    model, seen = Model(), list[Pass | None]()
    sequences = Sequences(model)
    for module, reads in sequences.readers():
        module.register_forward_pre_hook(reads, with_kwargs=True)
    model.register_forward_pre_hook(lambda *_: seen.append(sequences.current))
    model.register_forward_hook(sequences.leave)
    model(IDS)
    model(IDS[:, :2])
    first, second = seen
    assert first is not None and first.ids is not None and torch.equal(first.ids, IDS)
    assert second is not None and (second.total, second.new_from, second.number) == (2, 0, 2)
    assert sequences.current is None


def test_rows_belong_to_the_samples_in_order_or_are_refused() -> None:
    four = torch.ones(4, 2, dtype=torch.bool)
    assert of(four).samples_of_rows(None).tolist() == [0, 1, 2, 3]
    beams = of(four)
    beams.goes_on = True
    assert beams.samples_of_rows(2).tolist() == [0, 0, 1, 1]
    for found, count in ((of(four), 2), (beams, 3), (beams, 0)):
        with pytest.raises(ValueError, match=f"4 sequences and the batch {count} samples"):
            found.samples_of_rows(count)

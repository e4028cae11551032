"""What a call says of its tokens; the part of a tensor that `index`, `heads` and `tokens` select, read and written."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import normal
from pydantic import TypeAdapter
from small_nets import Net
from torch import Tensor, nn

import hookrun
from hookrun.engine.plan.plan import HeadCount
from hookrun.engine.runtime.call_stack import CallStack
from hookrun.engine.runtime.part import HeadsPart, Part, TensorPart, TokensPart, part_of
from hookrun.engine.runtime.tokens.calls import (
    CallReader,
    CallTokens,
    Pass,
    as_mask,
    labelled,
    made_from_labels,
)
from hookrun.engine.runtime.tokens.choice import Chosen, Rule
from hookrun.engine.runtime.tokens.sequences import Sequences
from hookrun.engine.spec.heads import Heads
from hookrun.engine.spec.tokens import Tokens
from hookrun.engine.values.index import Index, Item

X = torch.arange(24.0).reshape(2, 3, 4)


def part(*items: Item, in_order: bool = False) -> Part:
    return Part(Index(str(items), items), in_order=in_order)


def test_unordered_positions_are_refused() -> None:
    for selected, said in (
        (part(..., (0, 4)), "index 4 is out of bounds for dimension 2 with size 4"),
        (part(..., (1, -3)), "selects a position of dimension 2 twice"),
        (part((1, 0), in_order=True), "out of order"),
        (part(slice(2, 5)), r"selects nothing of a tensor of shape \[2, 3, 4\]"),
    ):
        with pytest.raises(IndexError, match=said):
            selected.of(X)
    assert torch.equal(part((1, 0)).of(X), X.flip(0))


def test_samples_are_known_if_the_first_dimension_is_complete() -> None:
    for items, kept in (((..., 0), True), ((slice(None), 1), True), ((0,), False), (((0, 1),), False)):
        assert part(*items).leaves((0,), 3) is kept, items
    assert not part(..., 0).leaves((0,), 1)
    assert part(..., 0).leaves((0, 1), 3)
    assert not part(..., 0).leaves((-1,), 3)


def test_a_dimension_from_the_end_stays_if_last() -> None:
    for items, kept in (((..., 0), False), ((..., slice(0, 2)), True), ((slice(None), 1), True)):
        assert part(*items).leaves((-2,), 4) is kept, items


def of(real: Tensor, **fields: Any) -> Pass:
    """The pass of a call whose prompts have these real tokens."""
    rows, columns = real.shape
    return Pass(CallTokens(rows, columns), **{"real": real, "prompt": columns, **fields})


REAL = torch.tensor([[False, True, True], [True, True, True]])


class Now:
    """The call of a batch of two prompts, padded on the left."""

    clock = SimpleNamespace(samples=None)
    chosen: Chosen
    path = ""

    def __init__(self, real: Tensor = REAL) -> None:
        self.tokens: Pass | None = of(real)


def part_at(action: str = "capture", **keys: Any) -> TensorPart | None:
    """The part at the heads of a batch of two prompts, of four tokens and, padded on the left, of two."""
    given = {"factor": 2} if action == "scale" else {}
    hook = {"select": "out", "hook": "forward", "action": action, **given, **keys}
    attention = Net(lambda m, x: m.out(x), out=nn.Identity())
    attention.num_heads = 4  # type: ignore[assignment]
    (planned,) = hookrun.compile({"h": hook}, attention).hooks
    now: Any = Now(torch.tensor([[True] * 4, [False, False, True, True]]))
    return part_of(planned, "out", now)


def test_index_tokens_heads_go_one_within_the_other() -> None:
    x = normal(2, 4, 8)  # four heads of width 2
    whole = part_at(heads=[1, 3], index="..., 1:", tokens=0)
    assert whole is not None
    apart = x.unflatten(-1, (4, 2))
    assert torch.equal(whole.of(x), torch.stack([apart[0, 0], apart[1, 2]])[:, [1, 3], 1:])
    expected = apart.clone()
    expected[0, 0, [1, 3], 1:] = expected[1, 2, [1, 3], 1:] = 7.0
    before = x.clone()
    assert torch.equal(whole.put(x, torch.tensor(7.0)), expected.flatten(2))
    assert torch.equal(x, before)


def test_samples_in_captures_must_stay_in_order() -> None:
    x = normal(2, 4, 8)
    captured = part_at(index="[1, 0]")
    edited = part_at("scale", index="[1, 0]")
    assert captured is not None
    assert edited is not None
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
    x = numbers(2, 3, 4, 5)
    for each in (x, x.flatten(2)):
        assert torch.equal(heads(3, 1).of(each), x[:, :, [3, 1]])
    with pytest.raises(ValueError, match="does not hold 4 heads"):
        heads(0).of(numbers(2, 3, 7))
    grouped = HeadsPart(Heads.model_validate({"pick": [3]}), HeadCount((4, 2), 8), -1)
    assert grouped.of(numbers(1, 4, 5, 8)).shape == (1, 1, 5, 8)
    for keys in (numbers(1, 2, 5, 8), numbers(1, 5, 16)):
        with pytest.raises(ValueError, match="there is no head 3 among 2"):
            grouped.of(keys)


def tokens(clause: Any, now: Any) -> TokensPart:
    given = clause if isinstance(clause, dict) else {"position": clause}
    return TokensPart(Rule(TypeAdapter(Tokens).validate_python(given), False, {}), now)


def test_rows_go_back_to_their_places_alone() -> None:
    middle = normal(2, 4, 3)
    pattern = normal(2, 5, 3, 3, seed=1)
    for clause, x, places in (
        (0, normal(2, 3, 4), [(0, 1), (1, 0)]),
        ({"position": 0, "dim": 2}, middle, [(0, slice(None), 1), (1, slice(None), 0)]),
        ({"query": -1, "key": 0}, pattern, [(0, slice(None), 2, 1), (1, slice(None), 2, 0)]),
        ({"key": 0}, pattern, [(0, ..., 1), (1, ..., 0)]),
    ):
        part = tokens(clause, Now())
        before = x.clone()
        rows = part.of(x)
        assert torch.equal(rows, torch.stack([x[place] for place in places])), clause
        expected = x.clone()
        for place in places:
            expected[place] = -1.0
        assert torch.equal(part.put(x, torch.full_like(rows, -1.0)), expected), clause
        rows.zero_()
        assert torch.equal(x, before), clause


def test_tokens_are_chosen_once_for_each_size() -> None:
    x = normal(2, 3, 4)
    now = Now()
    part = tokens(0, now)
    first = part.chosen(x)
    assert part.chosen(x + 1) is first
    now.tokens = Pass(CallTokens(2, 1), real=REAL, prompt=3, new_from=2)
    assert part.chosen(x) is not first
    assert len(part.chosen(x)) == 2
    assert part.nothing_of(x[:, 2:])


def test_parts_of_one_pass_choose_for_themselves() -> None:
    x = normal(2, 3, 4)
    now = Now()
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


# ---- the tokens of a call


IDS = torch.tensor([[5, 6, 0], [7, 8, 9]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


class Model(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        return input_ids


def test_ids_are_read_by_position_or_name() -> None:
    reader = CallReader(Model())
    for args, kwargs in (((IDS, MASK), {}), ((), {"input_ids": IDS, "attention_mask": MASK})):
        told = reader.read(args, kwargs)
        assert told is not None
        assert told.rows == 2
        assert told.columns == 3
        assert told.past is None
        assert told.ids is not None
        assert torch.equal(told.ids, IDS)
        assert told.ids.data_ptr() != IDS.data_ptr()
        assert told.mask is not None
        assert torch.equal(told.mask, MASK.bool())
    assert reader.read((), {"pixel_values": torch.zeros(2, 3)}) is None


def test_a_mask_wider_than_the_ids_says_how_much_a_cache_holds() -> None:
    wide = torch.ones(2, 5, dtype=torch.int64)
    told = CallReader(Model()).read((IDS, wide), {})
    assert told is not None
    assert told.past == 2
    assert CallTokens.of(IDS, wide).past == 2
    assert CallTokens.of(IDS, MASK).past is None


def test_tensors_without_data_give_shapes_only() -> None:
    told = CallReader(Model()).read((IDS.to("meta"),), {})
    assert told is not None
    assert not told.has_data
    assert told.ids is None
    assert told.columns == 3


def test_labels_say_which_decoder_tokens_are_real() -> None:
    labels = torch.tensor([[4, -100]])
    found = labelled(nn.Identity(), (), {"labels": labels})
    assert found is not None
    assert found.tolist() == [[True, False]]
    assert labelled(nn.Identity(), (), {"labels": labels, "decoder_input_ids": labels}) is None
    assert made_from_labels(nn.Sequential(Model())) == []


def test_a_token_is_real_if_any_query_attends_to_it() -> None:
    blocks = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]).tril().bool()[None, None]
    least = torch.finfo(torch.float32).min
    biased = torch.where(blocks, torch.arange(-4.0, 0), least)
    for mask in (blocks, blocks.long(), torch.where(blocks, 0.0, -torch.inf), biased):
        found = as_mask(mask, 2, 4)
        assert found is not None
        assert found.tolist() == [[True, True, False, True]] * 2
    assert as_mask(blocks, 1, 9) is None  # of the sliding window of a cache
    assert as_mask(torch.full((1, 6), 2), 2, 4).tolist() == [[True] * 4] * 2  # type: ignore[union-attr]


def test_positions_begin_at_the_first_real_token() -> None:
    left = torch.tensor([[False, True, True], [True, True, True]])
    found = of(left)
    assert found.positions.tolist() == [[-1, 0, 1], [0, 1, 2]]
    assert found.first
    assert not of(left, prompt=2, new_from=2).first


def test_an_encoder_s_pass_has_a_row_for_each_of_the_decoder_s() -> None:
    encoder = of(torch.tensor([[True, False], [True, True]]), ids=torch.tensor([[1, 0], [2, 3]]))
    seen = encoder.seen_by(of(torch.ones(4, 1, dtype=torch.bool)))
    assert seen.rows == 4
    assert seen.ids is not None
    assert seen.ids[:, 0].tolist() == [1, 1, 2, 2]
    assert seen.real[:, 1].tolist() == [False, False, True, True]
    assert encoder.rows == 2


def test_a_call_is_a_pass_until_it_ends() -> None:
    model = Model()
    seen = list[Pass | None]()
    calls = CallStack([], [])
    sequences = Sequences(model, calls)
    for module, read in sequences.readers():
        enter = partial(calls.enter, module, None, [read])
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(calls.leave)
    model.register_forward_pre_hook(lambda *_: seen.append(sequences.current))
    model(IDS)
    model(IDS[:, :2])
    first, second = seen
    assert first is not None
    assert first.ids is not None
    assert torch.equal(first.ids, IDS)
    assert second is not None
    assert second.total == 2
    assert second.new_from == 0
    assert second.number == 2
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

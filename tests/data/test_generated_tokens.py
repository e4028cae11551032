"""Data sets of generated tokens: the answers are in the samples, and targets are only where they can be known."""

from __future__ import annotations

import pytest
import torch
from token_samples import made, real, refusal

from hookrun.data.samples import IGNORED

GENERATED = ("repeated_tokens", "modular_addition", "names")


@pytest.mark.parametrize("name", GENERATED)
def test_samples_are_the_same_on_either_side_of_padding(name: str) -> None:
    small = {} if name == "modular_addition" else {"val_size": 20}
    info, right = made(name, **small)
    left_info, left = made(name, padding="left", **small)
    assert left_info.inputs.keys() - info.inputs.keys() == {"position_ids"}
    assert info.vocab_size is not None
    assert info.tokenizer is not None
    for number in range(20):
        inputs, target = right[number]
        assert set(inputs) == set(info.inputs)
        for key, each in inputs.items():
            assert tuple(each.shape) == info.inputs[key].shape
        ids, targets = real((inputs, target))
        assert real(left[number]) == (ids, targets) == real(right[number])
        assert max(ids) < info.vocab_size
        assert max(targets) >= 0
        there = left[number][0]
        assert there["position_ids"][there["attention_mask"].bool()].tolist() == list(range(len(ids)))
        assert int(there["attention_mask"][-1]) == 1 == int(inputs["attention_mask"][0])
    numbers = torch.arange(20)
    for each in right.spans(numbers).values():
        assert each.shape == (20, 2)
    assert set(right.spans(numbers)) == set(info.spans)
    with pytest.raises(IndexError):
        right[len(right)]


def test_the_second_half_repeats_the_first() -> None:
    _, samples = made("repeated_tokens", half=[2, 9], vocab_size=12, val_size=50)
    spans = samples.spans(torch.arange(50))
    lengths = set()
    for number in range(50):
        ids, targets = real(samples[number])
        first = ids[slice(*spans["first"][number].tolist())]
        second = ids[slice(*spans["second"][number].tolist())]
        assert first == second
        assert [0, *first, *second] == ids
        assert len(set(first)) == len(first)
        assert targets[len(first) + 1 : -1] == second[1:]
        assert set(targets[: len(first) + 1]) | {targets[-1]} == {IGNORED}
        lengths.add(len(first))
    assert lengths == set(range(2, 10))
    assert "9 different tokens do not fit" in refusal("repeated_tokens", half=[2, 9], vocab_size=9)
    _, every = made("repeated_tokens", predict="all", half=[3, 3])
    ids, targets = real(every[0])
    assert targets == [*ids[1:], IGNORED]


def test_prompts_of_names_have_the_same_length_in_every_form() -> None:
    sets = {form: made("names", form=form, val_size=40) for form in ("clean", "swapped", "other")}
    info, clean = sets["clean"]
    numbers = torch.arange(40)
    spans = clean.spans(numbers)
    wrong = clean.wrong(numbers)
    assert info.tokenizer is not None
    assert wrong is not None
    for number in range(40):
        ids, targets = real(clean[number])
        io = ids[int(spans["io"][number, 0])]
        subject = ids[int(spans["subject"][number, 0])]
        again = ids[int(spans["subject2"][number, 0])]
        assert targets[-1] == io != subject == again == wrong[number]
        swapped = real(sets["swapped"][1][number])
        other = real(sets["other"][1][number])
        assert swapped[1] == targets == other[1]
        assert swapped[0][int(spans["subject2"][number, 0])] == io
        assert not {io, subject} & set(other[0])
        assert sum(a != b for a, b in zip(ids, swapped[0], strict=True)) == 1
    text = info.tokenizer.decode(real(clean[0])[0])
    assert text.endswith(" to")
    assert list(info.tokenizer.encode(text).ids) == real(clean[0])[0]


def test_modular_addition_has_every_pair_once_with_its_sum() -> None:
    seen = []
    for split in ("train", "val"):
        _, samples = made("modular_addition", split, modulus=7)  # type: ignore[arg-type]
        for number in range(len(samples)):
            (a, plus, b, equals), targets = real(samples[number])
            assert plus == 7
            assert equals == 8
            assert targets == [IGNORED] * 3 + [(a + b) % 7]
            seen.append((a, b))
    assert sorted(seen) == [(a, b) for a in range(7) for b in range(7)]

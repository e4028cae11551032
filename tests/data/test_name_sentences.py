"""Sentences with two names, in three forms."""

from __future__ import annotations

import torch
from token_samples import made, real


def test_names_have_their_answer_their_spans_and_the_same_length_in_every_form() -> None:
    sets = {form: made("names", form=form, val_size=40) for form in ("clean", "swapped", "other")}
    info, clean = sets["clean"]
    numbers = torch.arange(40)
    spans, wrong = clean.spans(numbers), clean.wrong(numbers)
    assert info.tokenizer is not None and wrong is not None
    for number in range(40):
        ids, targets = real(clean[number])
        io, subject, again = (ids[int(spans[name][number, 0])] for name in ("io", "subject", "subject2"))
        assert targets[-1] == io != subject == again == wrong[number]
        swapped, other = (real(sets[form][1][number]) for form in ("swapped", "other"))
        assert swapped[1] == targets == other[1]
        assert swapped[0][int(spans["subject2"][number, 0])] == io and not {io, subject} & set(other[0])
        assert sum(a != b for a, b in zip(ids, swapped[0], strict=True)) == 1
    text = info.tokenizer.decode(real(clean[0])[0])
    assert text.endswith(" to") and list(info.tokenizer.encode(text).ids) == real(clean[0])[0]

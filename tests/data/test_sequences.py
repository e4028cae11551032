"""Many sequences of token ids laid end to end."""

from __future__ import annotations

import pytest

from hookrun.data import sequences
from hookrun.data.sequences import LONGEST, ReadSequences
from hookrun.errors import SpecError


def read(*each: tuple[list[int], int]) -> ReadSequences:
    found = ReadSequences("data.args.file")
    for ids, line in each:
        found.append(ids, line)
    return found


def test_each_sequence_is_read_back_with_its_line() -> None:
    found = read(([1, 2, 3], 1), ([4], 5), ([5, 6], 9))
    assert (len(found), found.tokens, found.longest) == (3, 6, 3)
    assert [found[number].tolist() for number in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert [found.line(number) for number in range(3)] == [1, 5, 9]
    assert found.span(2, 5).tolist() == [3, 4, 5]
    assert [found.line_at(place) for place in range(6)] == [1, 1, 1, 5, 9, 9]


def test_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MOST_TOKENS", 4)
    found = read(([1, 2, 3, 4], 1))
    with pytest.raises(SpecError, match=r"data\.args\.file: the file has more than 4 tokens"):
        found.append([5], 2)


def test_the_length_is_that_of_the_longest_unless_padding_to_it_costs_too_much() -> None:
    assert read(([1, 2, 3], 1)).length(None, "key") == 3
    assert read().length(None, "key") == 1
    long = read(([0] * (LONGEST + 1), 1))
    assert long.length(7, "key") == 7
    with pytest.raises(SpecError, match="key: the longest has 4,097 tokens"):
        long.length(None, "key")

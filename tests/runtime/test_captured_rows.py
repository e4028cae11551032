"""Captured rows have the sample and token of each, also after a copy."""

from __future__ import annotations

import copy
import pickle

import torch

from hookrun.actions.rows import TokenRows
from hookrun.runtime.captured_rows import CapturedRows


def rows(*numbers: int, keys: list[int] | None = None) -> TokenRows:
    of = torch.tensor(numbers)
    return TokenRows(of * 0, of, of + 1, of - 1, None if keys is None else torch.tensor(keys))


def test_descriptions_of_rows_are_concatenated_over_entries() -> None:
    captured = CapturedRows(find_decoder=lambda: "t{}".format)
    for each in (rows(2, 0), rows(1, keys=[7])):
        captured.append(torch.zeros(len(each.numbers)))
        captured.note(each)
    assert captured.sample_ids.tolist() == [2, 0, 1]
    assert captured.positions.tolist() == [3, 1, 2]
    assert captured.keys.tolist() == [-1, -1, 7]
    assert captured.text == ["t1", "", "t0"]  # the token of sample 0 is unknown
    for again in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert again.text == captured.text and again.keys.tolist() == captured.keys.tolist()
        assert len(again) == 2 and torch.equal(again[0], captured[0])


def test_without_rows_there_are_no_descriptions() -> None:
    assert CapturedRows().sample_ids.tolist() == [] and CapturedRows().text == []

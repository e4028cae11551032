"""Captured rows say which sample and token each is of, also after a copy."""

from __future__ import annotations

import copy
import pickle

import torch

from hookrun.actions.rows import TokenRows
from hookrun.runtime.captured_rows import CapturedRows


def rows(*numbers: int, keys: list[int] | None = None) -> TokenRows:
    of = torch.tensor(numbers)
    return TokenRows(of * 0, of, of + 1, of - 1, None if keys is None else torch.tensor(keys))


def test_what_is_said_of_rows_is_of_all_entries_one_after_the_other() -> None:
    captured = CapturedRows(find_decoder=lambda: "t{}".format)
    for each in (rows(2, 0), rows(1, keys=[7])):
        captured.append(torch.zeros(len(each.numbers)))
        captured.note(each)
    assert captured.sample_ids.tolist() == [2, 0, 1]
    assert captured.positions.tolist() == [3, 1, 2]
    assert captured.keys.tolist() == [-1, -1, 7]
    assert captured.text == ["t1", "", "t0"]  # the token of sample 0 is not known
    for again in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert again.text == captured.text and again.keys.tolist() == captured.keys.tolist()
        assert len(again) == 2 and torch.equal(again[0], captured[0])


def test_without_rows_there_is_nothing_to_say() -> None:
    assert CapturedRows().sample_ids.tolist() == [] and CapturedRows().text == []

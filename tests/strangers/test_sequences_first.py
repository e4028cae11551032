"""A recurrent net of others with the sequence first: the batch is dimension 1, also where a sequence is as long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from strangers_by_hand import SEQUENCE, seen_at

from hookrun.store.reader import Run

Runs = Callable[..., Run]
PREDICT = ("task=predict", "task.split=val")


@pytest.mark.parametrize("length", [6, 7])
def test_captures_of_sequences_first_are_rows_of_samples(length: int, run: Runs, capsys) -> None:
    stranger = replace(SEQUENCE, args={"length": length})  # a batch has 6 samples
    hook = "+hooks.seen={select: lstm, hook: forward, action: capture, target: '[0]'}"
    rows = run(stranger, *PREDICT, hook).captures["seen"]["lstm"]
    assert "batch dimension 1" in capsys.readouterr().out
    expected = torch.cat([output[0].transpose(0, 1) for output in seen_at(stranger, "lstm")])
    assert rows.sample_ids.tolist() == list(range(10))
    torch.testing.assert_close(rows[:], expected)


@pytest.mark.parametrize("length", [6, 7])
def test_kept_samples_of_sequences_first_are_samples(length: int, run: Runs) -> None:
    stranger = replace(SEQUENCE, args={"length": length})
    hook = "+hooks.seen={select: norm, hook: forward, action: capture, keep: {every: 3}}"
    rows = run(stranger, *PREDICT, hook).captures["seen"]["norm"]
    whole = torch.cat([output.transpose(0, 1) for output in seen_at(stranger, "norm")])
    assert rows.sample_ids.tolist() == [0, 3, 6, 9]
    torch.testing.assert_close(rows[:], whole[::3])

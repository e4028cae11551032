"""Means over batches are means over samples."""

from __future__ import annotations

import math

import pytest
import torch

from hookrun.tasks.loop.average import Average


def test_batches_count_by_their_size() -> None:
    average = Average()
    average.add(torch.tensor(1.0), torch.tensor([[1.0, 0.0]] * 3), torch.tensor([0, 0, 1]))
    average.add(torch.tensor(5.0), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert average.read() == pytest.approx({"loss": 2.0, "accuracy": 0.75})


def test_without_labels_there_is_no_accuracy_and_without_samples_nothing() -> None:
    average = Average()
    assert average.read() == {}
    average.add(torch.tensor(2.0), torch.ones(5), torch.zeros(64))
    assert average.read() == {"loss": 2.0}


def test_a_loss_that_is_no_number_stays_visible() -> None:
    average = Average()
    average.add(torch.tensor(1.0), torch.ones(1), torch.zeros(1))
    average.add(torch.tensor(math.nan), torch.ones(1), torch.zeros(1))
    assert math.isnan(average.read()["loss"])


def test_the_sum_is_precise_however_many_batches_there_are() -> None:
    average = Average()
    for _ in range(10_000):
        average.add(torch.tensor(0.1), torch.ones(1), torch.zeros(1))
    assert average.read()["loss"] == pytest.approx(torch.tensor(0.1).item(), rel=1e-12)

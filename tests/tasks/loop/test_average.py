"""Means over batches are means over samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.spec.metric import MetricKeys
from hookrun.tasks.loop.average import Average
from hookrun.tasks.loop.losses import loss_named
from hookrun.tasks.loop.metrics import load_metrics


def test_batches_are_weighted_by_their_size() -> None:
    average = Average()
    average.add(torch.tensor(1.0), torch.tensor([[1.0, 0.0]] * 3), torch.tensor([0, 0, 1]))
    average.add(torch.tensor(5.0), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert average.read() == pytest.approx({"loss": 2.0, "accuracy": 0.75})


def test_without_labels_there_is_no_accuracy_and_without_samples_no_value() -> None:
    average = Average()
    assert average.read() == {}
    average.add(torch.tensor(2.0), torch.ones(5), torch.zeros(64))
    assert average.read() == {"loss": 2.0}


def test_a_nan_loss_stays_nan() -> None:
    average = Average()
    average.add(torch.tensor(1.0), torch.ones(1), torch.zeros(1))
    average.add(torch.tensor(math.nan), torch.ones(1), torch.zeros(1))
    assert math.isnan(average.read()["loss"])


def test_the_sum_is_precise_over_many_batches() -> None:
    average = Average()
    for _ in range(10_000):
        average.add(torch.tensor(0.1), torch.ones(1), torch.zeros(1))
    assert average.read()["loss"] == pytest.approx(torch.tensor(0.1).item(), rel=1e-12)


def test_a_batch_without_targets_does_not_count() -> None:
    scores, target = torch.randn(2, 3, 5), torch.full((2, 3), IGNORED)
    loss = loss_named("next_token")(scores, target)
    assert float(loss) == 0
    average = Average(load_metrics(["loss", "accuracy"]))
    average.add(loss, scores, target, tokens=True)
    assert average.read() == {}
    target[1, 2] = 4
    average.add(loss_named("next_token")(scores, target), scores, target, tokens=True)
    assert average.samples == 1 and average.read()["loss"] == pytest.approx(
        float(F.cross_entropy(scores[1, 2:], target[1, 2:]))
    )
    with pytest.raises(HookrunError, match="next tokens"):
        loss_named("next_token")(scores[:, 0], target)
    hidden: Any = {"last_hidden_state": scores}
    with pytest.raises(HookrunError, match="no score for each token"):
        average.add(None, hidden, target, tokens=True)


def test_sums_that_are_saved_or_included_are_those_of_one_pass() -> None:
    keys = [MetricKeys(name="accuracy", by="sample"), MetricKeys(name="probability")]
    whole, first, second = (Average(load_metrics(keys)) for _ in range(3))
    scores, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    for average, rows in ((whole, slice(0, 5)), (first, slice(0, 2)), (second, slice(2, 5))):
        ids = torch.arange(5)[rows]
        average.add(torch.tensor(1.0), scores[rows], labels[rows], ids=ids, split="val")
    again = Average(load_metrics(keys))
    again.load_state_dict(first.state_dict())
    again.include(second)
    assert again.samples == 5 and again.read() == pytest.approx(whole.read())
    right = (scores.argmax(1) == labels).double().tolist()
    expected = [("val", {"of": "sample", "sample": number, "accuracy": right[number]}) for number in range(5)]
    assert list(again.lines()) == list(whole.lines()) == expected
    again.clear()
    assert again.read() == {} and not list(again.lines())

"""Means over batches are means over samples; sums by position and by sample have each value once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.spec.metric import MetricKeys
from hookrun.tasks.metrics.average import Average
from hookrun.tasks.metrics.losses import LOSSES
from hookrun.tasks.metrics.metrics import Metric, load_metrics
from hookrun.tasks.metrics.rows import BatchRows, of_samples, of_tokens, precise

LABELS = torch.tensor([0, 2])


def tokens_of(scores: Tensor, target: Tensor, chosen: Tensor | None = None) -> BatchRows:
    """The tokens that have a target, at the positions of their columns."""
    positions = torch.arange(target.shape[1]).expand_as(target)
    rows = of_tokens(scores, target, target != IGNORED if chosen is None else chosen, positions)
    assert rows is not None
    return rows


def test_batches_are_weighted_by_their_size() -> None:
    average = Average()
    average.add(torch.tensor(1.0), of_samples(torch.tensor([[1.0, 0.0]] * 3), torch.tensor([0, 0, 1])))
    average.add(torch.tensor(5.0), of_samples(torch.tensor([[1.0, 0.0]]), torch.tensor([0])))
    assert average.read() == pytest.approx({"loss": 2.0, "accuracy": 0.75})


def test_a_nan_loss_stays_nan() -> None:
    average = Average()
    average.add(torch.tensor(1.0), of_samples(torch.ones(1), torch.zeros(1)))
    average.add(torch.tensor(math.nan), of_samples(torch.ones(1), torch.zeros(1)))
    assert math.isnan(average.read()["loss"])


def test_the_sum_is_precise_over_many_batches() -> None:
    average = Average()
    for _ in range(10_000):
        average.add(torch.tensor(0.1), of_samples(torch.ones(1), torch.zeros(1)))
    assert average.read()["loss"] == pytest.approx(torch.tensor(0.1).item(), rel=1e-12)


def test_a_batch_without_targets_does_not_count() -> None:
    scores, target = torch.randn(2, 3, 5), torch.full((2, 3), IGNORED)
    loss = LOSSES["next_token"](scores, target)
    assert float(loss) == 0
    average = Average(load_metrics(["loss", "accuracy"]))
    average.add(loss, tokens_of(scores, target))
    assert average.read() == {}
    target[1, 2] = 4
    average.add(LOSSES["next_token"](scores, target), tokens_of(scores, target))
    assert average.samples == 1 and average.read()["loss"] == pytest.approx(
        float(F.cross_entropy(scores[1, 2:], target[1, 2:]))
    )
    with pytest.raises(HookrunError, match="next tokens"):
        LOSSES["next_token"](scores[:, 0], target)


def test_sums_that_are_saved_or_included_are_those_of_one_pass() -> None:
    keys = [MetricKeys(name="accuracy", by="sample"), MetricKeys(name="probability")]
    whole, first, second = (Average(load_metrics(keys)) for _ in range(3))
    scores, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    for average, rows in ((whole, slice(0, 5)), (first, slice(0, 2)), (second, slice(2, 5))):
        ids = torch.arange(5)[rows]
        average.add(torch.tensor(1.0), of_samples(scores[rows], labels[rows]), ids=ids, split="val")
    again = Average(load_metrics(keys))
    again.load_state_dict(first.state_dict())
    again.include(second)
    assert again.samples == 5 and again.read() == pytest.approx(whole.read())
    right = (scores.argmax(1) == labels).double().tolist()
    expected = [("val", {"of": "sample", "sample": number, "accuracy": right[number]}) for number in range(5)]
    assert list(again.lines()) == list(whole.lines()) == expected
    again.clear()
    assert again.read() == {} and not list(again.lines())


def by_hand(scores: Tensor, target: Tensor, ids: Tensor, by: str) -> dict[int, float]:
    """The mean probability of the targets under each key, value by value."""
    values = dict[int, list[float]]()
    for row, column in (target != IGNORED).nonzero().tolist():
        key = column if by == "position" else int(ids[row])
        probability = scores[row, column].softmax(0)[target[row, column]]
        values.setdefault(key, []).append(float(probability))
    return {key: sum(numbers) / len(numbers) for key, numbers in sorted(values.items())}


@pytest.mark.parametrize("by", ["position", "sample"])
def test_tokens_are_grouped_by_position_and_by_sample(by: Any) -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    target[torch.rand(6, 5) < 0.4] = IGNORED
    ids = torch.tensor([70, 50, 3, 9, 8, 50])  # a sample may be seen twice
    average = Average(load_metrics([MetricKeys(name="probability", by=by)]))
    for rows in (slice(0, 2), slice(2, 6)):
        average.add(None, tokens_of(scores[rows], target[rows]), ids=ids[rows], split="val")
    expected = by_hand(scores, target, ids, by)
    found = {line[by]: line["probability"] for _, line in average.lines()}
    assert found == pytest.approx(expected) and list(found) == list(expected)
    counts = [line["tokens"] for _, line in average.lines()] if by == "position" else []
    assert counts == [int(number) for number in (target != IGNORED).sum(0) if number and by == "position"]


def test_a_function_of_a_batch_is_called_for_each_sample() -> None:
    mean = Metric("mean", of_batch=lambda scores, target: precise(scores.mean()), by="sample")
    average = Average((mean,))
    scores, target = torch.randn(3, 2, 4), torch.tensor([[1, IGNORED], [2, 3], [IGNORED, IGNORED]])
    average.add(None, tokens_of(scores, target), ids=torch.tensor([4, 5, 6]), split="val")
    expected = {4: float(scores[0, 0].mean()), 5: float(scores[1].mean())}
    assert {line["sample"]: line["mean"] for _, line in average.lines()} == pytest.approx(expected)
    assert average.read()["mean"] == pytest.approx(float(scores[target != IGNORED].mean()))
    pictures = Average((mean,))
    pictures.add(None, of_samples(scores, torch.zeros(3)), ids=torch.arange(3), split="val")
    assert [line["mean"] for _, line in pictures.lines()] == pytest.approx(scores.mean((1, 2)).tolist())


def test_saved_sums_continue_to_the_same_bits() -> None:
    torch.manual_seed(0)
    straight, saved = (
        Average(load_metrics([MetricKeys(name="mean_squared_error", by="sample")])) for _ in range(2)
    )
    empty = saved.state_dict()
    for number in range(6):
        rows = of_samples(torch.randn(50) * 1e6, torch.zeros(50))
        ids = torch.randint(0, 7, (50,))
        for average in (straight, saved):
            average.add(None, rows, ids=ids)
        if number in (1, 3):
            state = saved.state_dict()
            saved.load_state_dict(state)
    assert list(saved.lines()) == list(straight.lines()) and saved.read() == straight.read()
    saved.load_state_dict(empty)
    assert not list(saved.lines()) and saved.read() == {}


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.ones(5), LABELS),
        (torch.tensor(1.0), LABELS),
        (torch.ones(2, 1), torch.tensor([0.5, 1.0])),
        (torch.ones(5, 3), LABELS),
        (torch.ones(2, 4), torch.empty(2, 0)),
        ("nothing", LABELS),
    ],
)
def test_without_labels_of_the_output_nothing_is_right_or_wrong(output: Any, target: Tensor) -> None:
    average = Average()
    average.add(None, of_samples(output, target))
    assert average.read() == {}
    with pytest.raises(HookrunError, match="'accuracy' needs class scores"):
        Average(load_metrics(["accuracy"])).add(None, of_samples(output, target))


def test_of_several_labels_of_a_sample_the_fraction_that_is_right_counts() -> None:
    pixels = torch.tensor([[[5.0, 0.0], [0.0, 5.0]]])  # one sample, two classes, two pixels: classes 0, 1
    average = Average()
    average.add(None, of_samples(pixels, torch.tensor([[0, 0]])))
    average.add(None, of_samples(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), LABELS))
    assert average.read() == {"accuracy": 0.5}

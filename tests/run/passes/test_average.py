"""Means over batches are means over samples, positions and chosen tokens; predictions of another run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.run.experiment.metrics.losses import LOSSES
from hookrun.run.experiment.metrics.metrics import load_metrics
from hookrun.run.experiment.metrics.predictions import predicted_rows
from hookrun.run.experiment.metrics.rows import BatchRows, of_samples, of_tokens
from hookrun.run.passes.average import Average
from hookrun.run.passes.batches import Batch, Batches
from hookrun.run.passes.measuring import Measuring
from hookrun.run.tasks import parse_experiment, prepare
from hookrun.store.format import PREDICTED
from hookrun.store.reader import Run, open_run
from hookrun.store.run_dir import RunDir

LABELS = torch.tensor([0, 2])


def tokens_of(scores: Tensor, target: Tensor) -> BatchRows:
    """The tokens that have a target, at the positions of their columns."""
    positions = torch.arange(target.shape[1]).expand_as(target)
    rows = of_tokens(scores, target, target != IGNORED, positions)
    assert rows is not None
    return rows


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
    scores = torch.randn(2, 3, 5)
    target = torch.full((2, 3), IGNORED)
    loss = LOSSES["next_token"](scores, target)
    assert float(loss) == 0
    average = Average(load_metrics(["loss", "accuracy"]))
    average.add(loss, tokens_of(scores, target))
    assert average.read() == {}
    target[1, 2] = 4
    average.add(LOSSES["next_token"](scores, target), tokens_of(scores, target))
    assert average.samples == 1
    assert average.read()["loss"] == pytest.approx(float(F.cross_entropy(scores[1, 2:], target[1, 2:])))
    with pytest.raises(HookrunError, match="next tokens"):
        LOSSES["next_token"](scores[:, 0], target)


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


def test_of_several_labels_the_right_fraction_counts() -> None:
    pixels = torch.tensor([[[5.0, 0.0], [0.0, 5.0]]])  # one sample, two classes, two pixels: classes 0, 1
    average = Average()
    average.add(None, of_samples(pixels, torch.tensor([[0, 0]])))
    average.add(None, of_samples(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), LABELS))
    assert average.read() == {"accuracy": 0.5}


def measuring(metrics: list[Any], **task: Any) -> tuple[Measuring, Batch]:
    sections = {
        "model": {"name": "decoder", "args": {"width": 8, "heads": 1, "layers": 1}},
        "data": {"name": "repeated_tokens", "batch_size": 4},
        "compute": {"device": "cpu"},
        "task": {"name": "evaluate", "metrics": metrics, **task},
    }
    prepared: Any = prepare(parse_experiment(sections))
    return Measuring(prepared), next(Batches(prepared, "val").epoch(0))


def test_a_metric_without_a_value_is_an_error_that_names_it() -> None:
    found, batch = measuring(["probability"], tokens=0)
    assert (batch.target[:, 0] == IGNORED).all()
    average = found.average()
    found.add(average, None, torch.randn(*batch.target.shape, 300), batch)
    with pytest.raises(HookrunError, match=r"'probability' has no value.* at the tokens of task.tokens"):
        found.require_all(average.read())
    found.require_all({"probability": 0.5})


def test_kl_compares_with_the_scores_without_hooks_at_any_token() -> None:
    found, batch = measuring(["kl"], tokens=0)
    assert found.without_hooks
    assert not measuring(["loss"])[0].without_hooks
    scores, others = torch.randn(2, *batch.target.shape, 5)
    average = found.average()
    found.add(average, None, scores, batch, others)
    log_p = others[:, 0].double().log_softmax(1)
    log_q = scores[:, 0].double().log_softmax(1)
    expected = float((log_p.exp() * (log_p - log_q)).sum(1).mean())
    assert average.read()["kl"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(HookrunError, match=r"'kl': the scores have shape \[\d+, 5\], .* with \[\d+, 4\]"):
        found.add(average, None, scores, batch, others[..., :4])


SCORES = torch.arange(6.0).reshape(3, 2)
Saved = Callable[..., Run]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A run that predicted something of its samples 7, 3 and 5."""

    def saved(output: Any, split: str | None = "val", ids: tuple[int, ...] = (7, 3, 5)) -> Run:
        run = RunDir.create(tmp_path / "run")
        if output is not None:
            at: dict[str, Any] = {"epoch": 0, "step": 0, "call": 0, "split": split}
            run.predictions.add(*PREDICTED, output, sample_ids=list(ids), **at)
        run.close()
        run.set_status("done")
        return open_run(run.path)

    return saved


def scores(run: Run, split: Any, *ids: int) -> torch.Tensor:
    return predicted_rows(run, split).of(torch.tensor(ids), torch.Generator())


def test_a_sample_or_a_split_that_was_not_predicted_is_named(saved: Saved) -> None:
    run = saved(SCORES)
    with pytest.raises(HookrunError, match=r"predictions of the run .*run has no row of sample 4: it has 3"):
        scores(run, "val", 3, 4)
    with pytest.raises(HookrunError, match=r"run predicted no sample of the split 'train'"):
        scores(run, "train", 3)


def test_rows_are_in_the_order_of_the_batch(saved: Saved) -> None:
    assert torch.equal(scores(saved(SCORES, split=None), "train", 5, 7, 5, 3), SCORES[[2, 0, 2, 1]])


@pytest.mark.parametrize(
    "output", [{"aux": SCORES + 1, "logits": SCORES}, (SCORES, SCORES + 1), {"out": SCORES}]
)
def test_of_several_tensors_the_scores_are_taken(saved: Saved, output: Any) -> None:
    assert torch.equal(scores(saved(output), "val", 7), SCORES[:1])


def test_a_run_without_scores_is_refused(saved: Saved) -> None:
    with pytest.raises(HookrunError, match="has no predictions: name a run of task=predict"):
        scores(saved(None), "val", 7)
    other: Any = SimpleNamespace(path="there", predictions={"hidden": SCORES})
    with pytest.raises(HookrunError, match="the predictions of the run there hold no scores, but hidden"):
        predicted_rows(other, "val")


def test_sums_that_an_earlier_version_has_saved_are_continued() -> None:
    average = Average()
    average.add(torch.tensor(2.0), of_samples(torch.ones(1), torch.zeros(1)))
    state = average.state_dict()
    del state["rows"]
    resumed = Average()
    resumed.load_state_dict(state)
    resumed.add(torch.tensor(4.0), of_samples(torch.ones(1), torch.zeros(1)))
    assert resumed.read()["loss"] == 3.0

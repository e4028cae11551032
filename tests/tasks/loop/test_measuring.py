"""Loss and metrics of the tokens that `task.tokens` names, a metric without a value, and predictions of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.run_values import RunReferences
from hookrun.store.format import PREDICTED
from hookrun.store.run_dir import RunDir
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.metrics.measuring import Measuring, Predicted
from hookrun.tasks.run.batches import Batch, Batches


def measuring(metrics: list[Any], **task: Any) -> tuple[Measuring, Batch]:
    sections = {
        "model": {"name": "decoder", "args": {"width": 8, "heads": 1, "layers": 1}},
        "data": {"name": "repeated_tokens", "batch_size": 4},
        "compute": {"device": "cpu"},
        "task": {"name": "evaluate", "metrics": metrics, **task},
    }
    prepared: Any = prepare(parse_experiment(sections))
    return Measuring(prepared), next(Batches(prepared, "val").epoch(0))


def test_loss_and_metrics_are_those_of_the_chosen_tokens() -> None:
    found, batch = measuring(["loss", "accuracy", "probability"], tokens=[17, 18, 19, 20])
    scores = torch.randn(*batch.target.shape, 300)
    chosen, targets = scores[:, 17:21].flatten(0, 1), batch.target[:, 17:21].flatten()
    predicted = targets != IGNORED
    chosen, targets = chosen[predicted], targets[predicted]
    assert 1 < len(targets) < 16, "some of these tokens are predicted"
    average = found.average()
    found.add(average, F.cross_entropy(scores.mT, batch.target), scores, batch)
    values = average.read()
    assert values["loss"] == pytest.approx(float(F.cross_entropy(chosen, targets)), rel=1e-5)
    assert values["accuracy"] == pytest.approx(float((chosen.argmax(1) == targets).float().mean()))
    right = chosen.softmax(1).gather(1, targets[:, None]).mean()
    assert values["probability"] == pytest.approx(float(right), rel=1e-5)


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
    assert found.without_hooks and not measuring(["loss"])[0].without_hooks
    scores, others = torch.randn(2, *batch.target.shape, 5)
    average = found.average()
    found.add(average, None, scores, batch, others)
    log_p, log_q = (each[:, 0].double().log_softmax(1) for each in (others, scores))
    expected = float((log_p.exp() * (log_p - log_q)).sum(1).mean())
    assert average.read()["kl"] == pytest.approx(expected, rel=1e-5)


Saved = Callable[..., Predicted | None]

SCORES = torch.arange(6.0).reshape(3, 2)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A run that predicted something of its samples 7, 3 and 5."""

    def saved(output: Any, split: str | None = "val", ids: tuple[int, ...] = (7, 3, 5)) -> Predicted | None:
        run = RunDir.create(tmp_path / "run")
        if output is not None:
            at: dict[str, Any] = {"epoch": 0, "step": 0, "call": 0, "split": split}
            run.predictions.add(*PREDICTED, output, sample_ids=list(ids), **at)
        run.close()
        run.set_status("done")
        return Predicted.of(RunReferences(), str(run.path))

    return saved


def test_scores_are_those_of_the_samples_in_the_order_of_the_batch(saved: Saved) -> None:
    predicted = saved(SCORES)
    assert predicted is not None
    found = predicted.scores(torch.tensor([5, 7, 5, 3]), "val")
    assert torch.equal(found, SCORES[[2, 0, 2, 1]])
    assert predicted.rows("val") is predicted.rows("val")


def test_a_sample_or_a_split_that_was_not_predicted_is_named(saved: Saved) -> None:
    predicted = saved(SCORES)
    assert predicted is not None
    with pytest.raises(HookrunError, match=r"predictions of the run .*run has no row of sample 4: it has 3"):
        predicted.scores(torch.tensor([3, 4]), "val")
    with pytest.raises(HookrunError, match=r"run predicted no sample of the split 'train'"):
        predicted.scores(torch.tensor([3]), "train")


def test_rows_without_a_split_are_of_any(saved: Saved) -> None:
    predicted = saved(SCORES, split=None)
    assert predicted is not None
    assert torch.equal(predicted.scores(torch.tensor([3]), "train"), SCORES[1:2])


@pytest.mark.parametrize(
    "output", [{"aux": SCORES + 1, "logits": SCORES}, (SCORES, SCORES + 1), {"out": SCORES}]
)
def test_of_several_tensors_the_scores_are_taken(saved: Saved, output: Any) -> None:
    predicted = saved(output)
    assert predicted is not None and torch.equal(predicted.scores(torch.tensor([7]), "val"), SCORES[:1])


def test_a_run_to_come_has_none_yet_and_one_without_scores_is_refused(saved: Saved, tmp_path: Path) -> None:
    assert Predicted.of(RunReferences({"later": None}), "later") is None
    with pytest.raises(HookrunError, match="has no predictions: name a run of task=predict"):
        saved(None)
    other = SimpleNamespace(open=lambda name: SimpleNamespace(path="there", predictions={"hidden": SCORES}))
    with pytest.raises(HookrunError, match="the predictions of the run there hold no scores, but hidden"):
        Predicted.of(cast(RunReferences, other), "there")

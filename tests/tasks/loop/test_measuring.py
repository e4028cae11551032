"""Loss and metrics of the tokens that `task.tokens` names, and a metric without any value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.loop.batches import Batch, Batches
from hookrun.tasks.loop.measuring import Measuring


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

"""The predictions of another run are found by sample, whatever the order in which it met them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hookrun.errors import HookrunError
from hookrun.run_values import FoundRuns
from hookrun.store.format import PREDICTED
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.predicted import Predicted

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
        return Predicted.of(FoundRuns(), str(run.path))

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
    assert Predicted.of(FoundRuns({"later": None}), "later") is None
    with pytest.raises(HookrunError, match="has no predictions: name a run of task=predict"):
        saved(None)
    other = SimpleNamespace(open=lambda name: SimpleNamespace(path="there", predictions={"hidden": SCORES}))
    with pytest.raises(HookrunError, match="the predictions of the run there hold no scores, but hidden"):
        Predicted.of(cast(FoundRuns, other), "there")

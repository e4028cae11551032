"""The result of a run: from its epochs, never from a single batch, and always finite."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hookrun.store.files import StoreError
from hookrun.store.objective import Goal
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.scores import is_batch, names, result, result_of

LOSS = Goal("train/loss", "minimize")
ACCURACY = Goal("val/accuracy", "maximize")


def line(split: str, epoch: int, of: str | None = "epoch", **values: float) -> dict[str, Any]:
    return {"split": split, "epoch": epoch, "step": epoch, **({"of": of} if of else {}), **values}


EPOCHS = [
    line("train", 0, "batch", loss=0.0001, lr=0.1),
    line("train", 0, loss=2.0),
    line("train", 1, loss=1.0),
    line("train", 2, loss=3.0),
]


def test_the_best_epoch_counts() -> None:
    assert result(EPOCHS, LOSS).value == 1.0
    assert result(EPOCHS, LOSS).epoch == 1
    assert result(EPOCHS, Goal("train/loss", "minimize", "last")).value == 3.0
    assert result(EPOCHS, Goal("train/loss", "maximize")).value == 3.0
    assert result(EPOCHS[:1], LOSS).value is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_the_best(bad: float) -> None:
    diverged = [*EPOCHS, line("train", 3, loss=bad)]
    assert result(diverged, LOSS).value == 1.0
    assert result(diverged, Goal("train/loss", "minimize", "last")).value is None
    assert result([line("train", 0, loss=bad)], LOSS).value is None
    assert names([line("train", 0, loss=bad)]) == []


def test_lines_of_an_earlier_version_are_read() -> None:
    batch = line("train", 0, None, loss=9.0, lr=0.1)
    mean = line("val", 0, None, accuracy=0.5, loss=1.0)
    lines = (batch, mean, line("train", 0, None, loss=1.0))
    assert [is_batch(each) for each in lines] == [True, False, False]
    found = result_of({"status": "done"}, [batch, mean])
    assert found is not None
    assert found.goal == ACCURACY
    assert found.value == 0.5
    assert result_of({"status": "done"}, [line("val", 0, None, samples=3)]) is None


def test_the_similarity_of_a_module_with_itself_does_not_count() -> None:
    lines = [
        {"split": "similarity", "module": a, "other": b, "cka": 1.0 if a == b else 0.5}
        for a in "xy"
        for b in "xy"
    ]
    assert result(lines, Goal("similarity/cka", "maximize")).value == 0.5


def test_the_result_in_the_status_is_checked(tmp_path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("done", objective=result(EPOCHS, LOSS).model_dump())
    found = result_of(open_run(tmp_path).status, [])
    assert found == result(EPOCHS, LOSS)
    run.set_status("done", objective={**result(EPOCHS, LOSS).model_dump(), "direction": "up"})
    with pytest.raises(StoreError, match=r"objective\.direction"):
        open_run(tmp_path).status  # noqa: B018


def test_a_line_without_a_known_kind_of_mean_is_refused(tmp_path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("done")
    run.log_metrics(split="train", of="batch", loss=1.0)
    run.log_metrics(split="train", of="week", loss=1.0)
    run.close()
    with pytest.raises(StoreError, match=r"line 2: .*'batch' or 'epoch'"):
        open_run(tmp_path).metrics  # noqa: B018

"""Rows of training and of validation samples, which have the same numbers, are distinguished."""

from __future__ import annotations

import pytest
import torch

import hookrun
from hookrun import data
from hookrun.spec.experiment import Data

BOTH = ("train.epochs=1", "train.limit_batches=2", "train.shuffle=false")


def labels(split: str, count: int) -> list[int]:
    samples = data.load(Data(name="digits"), split, seed=0)
    return [int(samples[number][1]) for number in range(count)]


def test_a_training_run_captures_samples_of_both(run, hook) -> None:
    found = run(*BOTH, hook(select="fc", hook="forward", action="capture"))
    rows = found.captures["h"]["fc"]
    assert rows.splits.tolist() == [0] * 128 + [1] * 128
    assert rows.sample_ids.tolist() == [*range(128), *range(128)]
    assert rows.where(sample=3, split="val").tolist() == [131]
    with pytest.raises(hookrun.HookrunError, match="there is no split 'valid', there are train, val"):
        rows.where(split="valid")
    assert found.labels_of(rows).tolist() == labels("train", 128) + labels("val", 128)
    row, label = found.dataset(rows)[131]
    assert torch.equal(row, rows[131]) and label == labels("val", 4)[3]


def test_a_probe_of_validation_rows_of_a_training_run_has_their_labels(run, hook) -> None:
    entry = hook(select="fc", hook="forward", action="capture", when="{mode: eval, epoch: {start: 2}}")
    trained = run("train.epochs=3", entry)
    assert set(trained.captures["h"]["fc"].splits.tolist()) == {1}
    [line] = run("task=probe", f"task.run={trained.path}").metrics
    assert line["samples"] == 359 and line["accuracy"] > 0.8


def test_validation_rows_are_not_used_for_training_samples(run, refused, hook) -> None:
    entry = hook(select="fc", hook="forward", action="capture", when="{mode: eval}")
    trained = run("train.epochs=1", entry)
    value = f"{{run: '{trained.path}', capture: h, module: fc, sample: same}}"
    patch = f"+hooks.p={{select: fc, hook: forward, action: replace, value: {value}, when: {{mode: train}}}}"
    assert "its samples are of the split 'val', these of 'train'" in refused("task=train", patch)
    run("task=predict", patch.replace(", when: {mode: train}", ""))


def test_predictions_and_gradients_have_their_split_too(run, hook) -> None:
    found = run("task=predict", "task.split=train", "train.limit_batches=1")
    assert set(found.predictions.splits.tolist()) == {0}
    found = run(*BOTH, hook(select="fc.bias", hook="grad", action="capture"))
    assert set(found.captures["h"]["fc.bias"].splits.tolist()) == {0}
    with pytest.raises(hookrun.HookrunError, match="some rows do not belong to a sample"):
        found.labels_of(found.captures["h"]["fc.bias"])

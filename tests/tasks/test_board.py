"""task.tensorboard: what a run records, in event files, under the names that its other files use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

QUICK = ("train.epochs=2", "train.limit_batches=4", "train.log_every=2", "task.tensorboard=true")


def events(path: Path) -> EventAccumulator:
    found = EventAccumulator(
        str(path / "tensorboard"), size_guidance={"histograms": 0, "scalars": 0, "images": 0}
    )
    found.Reload()
    return found


def scalars(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_metrics_are_those_of_the_run(run: Callable[..., Any]) -> None:
    found = run(*QUICK)
    written = events(found.path)
    for split, of, tag in (
        ("train", "batch", "train/loss"),
        ("train", "epoch", "train/loss/epoch"),
        ("val", "epoch", "val/loss"),
    ):
        lines = [line for line in found.metrics if (line["split"], line["of"]) == (split, of)]
        expected = [(line["step"], pytest.approx(line["loss"])) for line in lines]
        assert scalars(written, tag) == expected and expected
    assert "train/lr" in written.Tags()["scalars"]


def test_statistics_are_scalars_and_those_of_an_evaluation_follow_its_training(run, hook) -> None:
    found = run(*QUICK, hook(select="fc", hook="forward", action="stats", of="[mean, std]"))
    written = events(found.path)
    records = [line for line in found.stats if line["mode"] == "train"]
    expected = [(line["step"], pytest.approx(line["mean"])) for line in records]
    assert scalars(written, "h/fc/mean/train") == expected and len(expected) == 8
    assert [step for step, _ in scalars(written, "h/fc/std/eval")] == [4, 5, 6, 7, 8, 9, 10, 11]


def test_captures_are_histograms_and_pictures_on_the_logged_steps(run, hook) -> None:
    entry = hook(select="[relu2,fc]", hook="forward", action="capture")
    found = run("task=predict", "task.tensorboard=true", "train.limit_batches=4", "train.log_every=2", entry)
    written = events(found.path)
    histograms = written.Histograms("h/fc/eval")
    assert [event.step for event in histograms] == [0, 2]
    rows = found.captures["h"]["fc"]
    for event in histograms:
        batch = rows[64 * event.step : 64 * event.step + 64].double()
        seen = event.histogram_value
        assert (seen.num, seen.min, seen.max) == (640, pytest.approx(batch.min()), pytest.approx(batch.max()))
        assert seen.sum == pytest.approx(float(batch.sum()), rel=1e-5)
    [first, _] = written.Images("h/relu2/eval/maps")
    assert (first.height, first.width) == (8 * 5 + 1, 8 * 5 + 1)
    assert written.Tags()["images"] == ["h/relu2/eval/maps"]


def test_what_is_not_finite_is_left_out_of_a_histogram(run, hook, tmp_path: Path) -> None:
    broken = "+hooks.broken={select: fc, hook: forward, action: scale, factor: inf}"
    entry = hook(select="fc", hook="forward", action="capture")
    found = run("task=predict", "task.tensorboard=true", "train.limit_batches=1", broken, entry)
    assert not torch.isfinite(found.captures["h"]["fc"][:]).any()
    assert events(found.path).Tags()["histograms"] == []


def test_nothing_is_written_unasked(run) -> None:
    found = run("train.epochs=1", "train.limit_batches=1")
    assert not (found.path / "tensorboard").exists()


def test_without_the_package_it_is_refused(refused, monkeypatch) -> None:
    monkeypatch.setattr("hookrun.tasks.under_hooks.find_spec", lambda name: None)
    said = refused("task.tensorboard=true")
    assert "task.tensorboard: tensorboard is not installed" in said and "hookrun[tensorboard]" in said

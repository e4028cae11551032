"""TensorBoard: what a run records, in event files, under the names that its other files use."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hookrun.cli import main
from hookrun.engine.runtime.site import HookSite
from hookrun.run.passes.loggers import LoggedRun
from hookrun.run.passes.loggers.tensorboard import MOST_ELEMENTS, TensorBoard
from hookrun.store.reader import open_run
from hookrun.store.verify import verify

QUICK = ("compute.device=cpu", "train.limit_batches=4", "train.log_every=2")
STATS = "+hooks.h={select: fc, hook: forward, action: stats, of: [mean, std]}"


def events(path: Path) -> EventAccumulator:
    sizes = {"histograms": 0, "scalars": 0, "images": 0, "tensors": 0}
    found = EventAccumulator(str(path / "tensorboard"), size_guidance=sizes)
    found.Reload()
    return found


def scalars(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a sweep of two trainings, each logged by TensorBoard."""
    path = tmp_path_factory.mktemp("sweep")
    logged = ["task.loggers=[tensorboard]", f"hydra.sweep.dir={path}", STATS]
    assert main(["-m", *QUICK, "train.epochs=2", *logged, "train.optimizer.lr=0.01,0.02"]) == 0
    return path


def test_each_job_of_a_sweep_has_its_own_experiment(sweep: Path) -> None:
    for job, rate in enumerate((0.01, 0.02)):
        found = events(sweep / f"{job}")
        run = open_run(sweep / f"{job}")
        wanted = dict[str, list[tuple[int, object]]]()
        for line in run.metrics:
            tag = f"{line['split']}/loss"
            if line["split"] == "train" and line["of"] == "epoch":
                tag += "/epoch"
            wanted.setdefault(tag, []).append((line["step"], pytest.approx(line["loss"])))
        assert set(wanted) == {"train/loss", "val/loss", "train/loss/epoch"}
        for tag, values in wanted.items():
            assert scalars(found, tag) == values
        (config,) = found.Tensors("config/text_summary")
        assert f"train.optimizer.lr: {rate}" in config.tensor_proto.string_val[0].decode()
        assert verify(run.path).bad == []


def test_statistics_of_an_evaluation_follow_its_training(sweep: Path) -> None:
    found = open_run(sweep / "0")
    written = events(found.path)
    records = [line for line in found.stats if line["mode"] == "train"]
    expected = [(line["step"], pytest.approx(line["mean"])) for line in records]
    assert scalars(written, "h/fc/mean/train") == expected
    assert len(expected) == 8
    assert [step for step, _ in scalars(written, "h/fc/std/eval")] == [4, 5, 6, 7, 8, 9, 10, 11]


def test_captures_are_histograms_on_the_logged_steps(executed, hook) -> None:
    entry = hook(select="[relu2,fc]", hook="forward", action="capture")
    found = executed(*QUICK, "task=predict", "task.tensorboard=true", entry)
    written = events(found.path)
    histograms = written.Histograms("h/fc/eval")
    assert [event.step for event in histograms] == [0, 2]
    rows = found.captures["h"]["fc"]
    for event in histograms:
        batch = rows[64 * event.step : 64 * event.step + 64].double()
        seen = event.histogram_value
        assert seen.num == 640
        assert seen.min == pytest.approx(batch.min())
        assert seen.max == pytest.approx(batch.max())
        assert seen.sum == pytest.approx(float(batch.sum()), rel=1e-5)
    [first, _] = written.Images("h/relu2/eval/maps")
    assert first.height == 8 * 5 + 1
    assert first.width == 8 * 5 + 1
    assert written.Tags()["images"] == ["h/relu2/eval/maps"]


def test_records_are_shown_as_far_as_they_have_numbers(tmp_path: Path) -> None:
    """The steps of an evaluation go on from the step at which it began."""
    clock = SimpleNamespace(mode="eval", step=2)
    site = cast(
        HookSite, SimpleNamespace(hook_name="h", path="", current=SimpleNamespace(within=""), clock=clock)
    )
    logger = TensorBoard(LoggedRun(tmp_path, {}))
    logger.reached = 10
    value = {
        "complex": torch.tensor([3 + 4j]), "flags": torch.tensor([True, False]), "none": None, "empty": torch.ones(0),
        "number": torch.tensor(7), "broken": torch.tensor([torch.nan]), "maps": torch.rand(2, 70, 3, 3).half(),
        "large": torch.arange(MOST_ELEMENTS * 2 + 1), "rows": torch.ones(2, 3, 1, 5, requires_grad=True),
    }  # fmt: skip
    logger.value(site, [value])
    about = {"hook": "h", "module": "", "path": "[0]", "action": "stats", "mode": "eval", "step": 2}
    logger.record({**about, "epoch": 0, "mean": 0.5, "ok": True, "shape": [2], "count": 3, "of_rank": 1})
    logger.record({"spent": 100, "hook": "h"})
    logger.close(failed=False)
    found = events(tmp_path)
    names = {"complex", "flags", "number", "maps", "large", "rows"}
    assert set(found.Tags()["histograms"]) == {f"h/root[0].{name}/eval" for name in names}
    assert found.Tags()["images"] == ["h/root[0].maps/eval/maps"]
    largest = found.Histograms("h/root[0].large/eval")[0]
    assert largest.step == 12
    assert largest.histogram_value.num <= MOST_ELEMENTS
    assert found.Histograms("h/root[0].complex/eval")[0].histogram_value.sum == 5
    assert found.Tags()["scalars"] == ["h/root[0]/mean/eval", "h/root[0]/count/eval"]
    assert scalars(found, "h/root[0]/mean/eval") == [(12, 0.5)]


def test_histograms_and_counts_are_histograms(tmp_path: Path) -> None:
    logger = TensorBoard(LoggedRun(tmp_path, {}))
    about = {"hook": "h", "module": "fc", "path": "", "action": "stats", "mode": "train", "step": 3}
    bins = {"counts": [1, 0, 3], "edges": [-1.0, 0.0, 1.0, 2.0]}
    logger.record({**about, "histogram": bins, "counts": [5, 2], "quantiles": [0.1, 0.2], "mean": [0.5, 0.5]})
    nothing = {"counts": [0], "edges": [math.nan, math.nan]}
    logger.record({**about, "module": "none", "histogram": nothing, "counts": [[1, 2], [3, 4]]})
    logger.record({**about, "module": "channels", "histogram": [bins, bins]})
    logger.close(failed=False)
    found = events(tmp_path)
    assert set(found.Tags()["histograms"]) == {"h/fc/histogram/train", "h/fc/counts/train"}
    assert found.Tags()["scalars"] == []
    (event,) = found.Histograms("h/fc/histogram/train")
    seen = event.histogram_value
    assert event.step == 3
    assert (seen.min, seen.max, seen.num, seen.sum) == (-1, 2, 4, 4)
    assert list(zip(seen.bucket_limit, seen.bucket, strict=True)) == [(0, 1), (1, 0), (2, 3)]
    (event,) = found.Histograms("h/fc/counts/train")
    assert list(event.histogram_value.bucket) == [5, 2]

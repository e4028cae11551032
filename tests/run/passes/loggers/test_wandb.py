"""Weights & Biases: offline and within the run directory unless the user says otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hookrun.run.passes.loggers import LoggedRun
from hookrun.run.passes.loggers.wandb import WeightsAndBiases
from hookrun.store.verify import verify

QUICK = ("train.epochs=1", "train.limit_batches=4", "train.log_every=2")


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_into_the_run_directory(executed) -> None:
    pytest.importorskip("wandb", reason="hookrun[wandb] is not installed")
    found = executed(*QUICK, "task.loggers=[wandb]", "experiment=clip_fc")
    (record,) = found.path.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for word in (b"train/loss", b"val/accuracy", b"clip_fc", b"train/lr"):
        assert word in content
    assert verify(found.path).bad == []


class Library(SimpleNamespace):
    """Stands in for the package: notes what it is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(told=[], asked={}, folder=folder / "wandb" / "offline-run-1")
        (self.folder / "files").mkdir(parents=True)

    def Settings(self, **keys: Any) -> dict[str, Any]:
        return keys

    def Histogram(self, *, np_histogram: Any) -> Any:
        return np_histogram

    def init(self, **keys: Any) -> Any:
        self.asked = keys
        return SimpleNamespace(
            dir=str(self.folder / "files"), define_metric=lambda *_, **keys: self.told.append(keys),
            log=self.told.append, finish=lambda exit_code: self.told.append(exit_code),
        )  # fmt: skip


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_it_tells_nothing_of_the_machine(library, tmp_path, monkeypatch) -> None:
    run = LoggedRun(tmp_path, {"seed": 3})
    for mode, project in (("", ""), ("online", "mine")):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_PROJECT", project)
        WeightsAndBiases(run)
        asked = library.asked
        assert asked["mode"] == (mode or "offline")
        assert asked["project"] == (project or "hookrun")
        assert asked["dir"] == str(tmp_path)
        assert asked["name"] == run.name
        assert asked["config"] == {"seed": 3}
        assert asked["reinit"] == "create_new"
        assert asked["settings"]["console"] == "off"
        private = dict.fromkeys(("disable_git", "x_disable_meta", "x_disable_machine_info"), True)
        assert {**private, "save_code": False}.items() <= asked["settings"].items()
    assert "WANDB_ERROR_REPORTING" not in os.environ


def test_histograms_of_statistics_are_logged(library: Library, tmp_path: Path) -> None:
    logger = WeightsAndBiases(LoggedRun(tmp_path, {}))
    library.told.clear()
    logger.reached = 10
    about = {"hook": "h", "module": "", "path": "[0]", "action": "stats", "mode": "eval", "step": 2}
    logger.record({**about, "mean": 0.5, "counts": [5, 2], "quantiles": [0.1]})
    logger.record({**about, "counts": [1] * 513})  # more bins than wandb takes
    edges = [0.0, 1.0, 2.0]
    assert library.told == [{"h/root[0]/counts/eval": ([5, 2], edges), "step": 12}]


def test_metrics_have_their_step(library: Library, tmp_path: Path) -> None:
    logger = WeightsAndBiases(LoggedRun(tmp_path, {}))
    logger.metrics("train", {"loss": 0.5, "lr": 0.1}, 7, "batch")
    logger.metrics("train", {"loss": 0.25}, 8, "epoch")
    (library.folder / "logs").mkdir()
    (library.folder / "logs" / "debug.log").symlink_to(tmp_path / "elsewhere")
    (library.folder / "run-1.wandb").write_text("kept")
    logger.close(failed=True)
    logger.close(failed=False)
    assert library.told == [
        {"step_metric": "step"}, {"train/loss": 0.5, "train/lr": 0.1, "step": 7},
        {"train/loss/epoch": 0.25, "step": 8}, 1, 0,
    ]  # fmt: skip
    assert [path.name for path in library.folder.rglob("*") if path.is_file() or path.is_symlink()] == [
        "run-1.wandb"
    ]

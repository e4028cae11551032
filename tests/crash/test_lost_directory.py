"""A run whose directory is removed fails early, and does not create the directory again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookrun.cli import main
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir
from hookrun.tasks.run.context import RunContext

AT = {"epoch": 0, "step": 0, "call": 0}
SMALL = ("compute.device=cpu", "compute.threads=1", "hydra.run.dir=run")
CAPTURE = "+hooks.h={select: relu2, hook: forward, action: capture}"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def at_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Call a function before the n-th forward; returns a list that grows by one with each forward."""

    forward = RunContext.forward

    def at_forward(number: int, do: Callable[[], Any]) -> list[int]:
        calls = list[int]()

        def counted(self: RunContext, *args: Any) -> Any:
            calls.append(len(calls))
            if len(calls) == number:
                do()
            return forward(self, *args)

        monkeypatch.setattr(RunContext, "forward", counted)
        return calls

    return at_forward


def remove(path: Path) -> None:
    """Remove at once, even while another thread writes into it."""
    gone = path.with_name("gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(gone, ignore_errors=True)


def test_a_run_whose_directory_is_removed_fails_early(tmp_path: Path, at_forward, capsys) -> None:
    path = tmp_path / "run"
    tasks = {
        "task=train train.log_every=1": "metrics.jsonl was removed during the run",
        "task=predict task.split=train compute.capture_buffer=1": "samples.jsonl was removed during the run",
        "task=evaluate": "No such file or directory",
    }
    for task, said in tasks.items():
        calls = at_forward(2, lambda: remove(path))
        assert main([*SMALL, *task.split(), CAPTURE]) == 1, task
        err = capsys.readouterr().err
        assert str(path) in err and said in err, err
        assert "Traceback" not in err.replace("traceback: not saved", ""), err
        assert len(calls) < 20, f"{task}: it went on for {len(calls)} batches"
        assert not path.exists(), task


def test_a_run_does_not_write_into_another_run_of_its_name(tmp_path: Path, at_forward, capsys) -> None:
    path = tmp_path / "run"

    def replaced() -> None:
        path.rename(tmp_path / "moved")
        path.mkdir()
        (path / "status.json").write_text("another's")

    at_forward(2, replaced)
    assert main([*SMALL, "task=evaluate"]) == 1
    assert "removed during the run" in capsys.readouterr().err
    assert {each.name: each.read_text() for each in path.iterdir() if each.suffix == ".json"} == {
        "status.json": "another's"
    }


def test_a_missing_shard_is_an_error_when_the_manifest_is_written(tmp_path: Path, at_forward, capsys) -> None:
    lost = tmp_path / "run/captures/000000.safetensors"
    at_forward(20, lambda: lost.unlink())
    assert main([*SMALL, "task=predict", "task.split=train", "compute.capture_buffer=1", CAPTURE]) == 1
    assert "has lost captures that were written to it: captures/000000.safetensors" in capsys.readouterr().err


def test_each_part_of_a_removed_directory_names_its_path(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.set_status("running")
    run.log_metrics(step=0)
    run.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    run.captures.flush()
    shutil.rmtree(run.path)
    run.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    cases: dict[str, Callable[[], Any]] = {
        "metrics.jsonl was removed during the run, with its 1 lines": lambda: run.log_metrics(step=1),
        "captures/index.jsonl was removed": run.captures.flush,
        "cannot be reached: No such file": lambda: run.set_status("done"),
        "cannot be reached": run.write_manifest,
    }
    for said, write in cases.items():
        with pytest.raises(StoreError, match=said) as caught:
            write()
        assert str(run.path) in str(caught.value)
    with pytest.raises(StoreError, match="was removed during the run"):
        run.close()
    assert not run.path.exists()

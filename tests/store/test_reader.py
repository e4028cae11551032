"""A run directory is read back as it was written; another directory is an error with the next step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hookrun import data
from hookrun.data import Split
from hookrun.spec.experiment import Data
from hookrun.store.captures import StoredCapture
from hookrun.store.files import StoreError
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir, update_latest

AT = {"epoch": 0, "step": 0, "call": 0}
PLAN: dict[str, Any] = {
    "hooks": [
        {"name": "features", "targets": [{"path": "layer4", "names": ["layer4", "body.last"]}]},
        {"name": "clip", "max": math.inf},
    ]
}


def finished(path: Path) -> RunDir:
    run = RunDir.create(path)
    run.set_status("done")
    run.close()
    return run


def test_everything_that_was_written_is_read_back(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.set_status("running")
    run.write_plan(PLAN)
    run.write_env({"python": "3.11"})
    run.log_metrics(step=0, loss=0.5)
    run.log_metrics(step=1, loss=math.inf)
    run.append("stats.jsonl", [{"hook": "s", "values": {"mean": [0.5, -math.inf]}}])
    batch = torch.randn(4, 2)
    run.captures.add("features", "layer4", batch, sample_ids=[1, 0, 3, 2], **AT)
    run.predictions.add("predictions", "output", batch, sample_ids=[0, 1, 2, 3], **AT)
    run.close()
    run.set_status("done")

    found = open_run(tmp_path)
    assert found.path == tmp_path
    assert (found.status["status"], found.status["exit_code"]) == ("done", 0)
    assert found.plan == PLAN
    assert found.env == {"python": "3.11"}
    assert found.metrics == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": math.inf}]
    assert found.stats == [{"hook": "s", "values": {"mean": [0.5, -math.inf]}}]
    capture = found.captures["features"]["layer4"]
    assert torch.equal(capture[0:2], batch[[1, 0]])
    assert isinstance(found.predictions, StoredCapture)
    assert torch.equal(found.predictions[:], batch)
    assert found.notes == []
    assert repr(found) == f"<run {tmp_path}: done>"


def test_a_module_is_found_by_any_of_its_names_in_the_plan(tmp_path: Path) -> None:
    run = finished(tmp_path)
    run.write_plan(PLAN)
    run.captures.add("features", "layer4", torch.ones(1), sample_ids=None, **AT)
    run.captures.close()
    modules = open_run(tmp_path).captures["features"]
    assert modules["body.last"] is modules["layer4"]


def test_predictions_may_be_a_container(tmp_path: Path) -> None:
    run = finished(tmp_path)
    run.predictions.add("predictions", "output", {"boxes": torch.ones(1)}, sample_ids=[0], **AT)
    run.predictions.close()
    found = open_run(tmp_path).predictions
    assert found is not None and not isinstance(found, StoredCapture)
    assert found["boxes"][0].tolist() == 1


def test_a_run_without_records_can_be_read(tmp_path: Path) -> None:
    finished(tmp_path)
    run = open_run(str(tmp_path))
    assert (run.metrics, run.stats, run.plan, run.env, dict(run.captures), run.predictions) == (
        [],
        [],
        {},
        {},
        {},
        None,
    )


def test_the_status_is_read_again_while_the_run_continues(tmp_path: Path) -> None:
    writing = RunDir.create(tmp_path)
    writing.set_status("running")
    run = open_run(tmp_path)
    assert run.status["status"] == "running"
    assert run.notes == []
    writing.set_status("stopped", "check nan_hunt tripped")
    assert (run.status["status"], run.status["exit_code"]) == ("stopped", 3)


def test_a_run_that_was_cut_off_has_a_note_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = RunDir.create(tmp_path)
    writing.set_status("running")
    writing.log_metrics(step=0)
    writing.captures.add("f", "m", torch.ones(1), sample_ids=None, **AT)
    writing.close()
    for name in ("metrics.jsonl", "captures/index.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step"')

    def gone(pid: int, signal: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    run = open_run(tmp_path)
    assert run.metrics == [{"step": 0}]
    assert len(run.captures["f"]["m"]) == 1
    process, metrics, index = run.notes
    assert process == f"it says 'running', but there is no process {os.getpid()} here: it was cut off"
    assert metrics.startswith(f"{tmp_path}/metrics.jsonl: the last line is cut off")
    assert index.startswith(f"{tmp_path}/captures/index.jsonl: the last line is cut off")


def test_a_run_of_another_user_is_seen_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, signal: int) -> None:
        raise PermissionError

    RunDir.create(tmp_path).set_status("running")
    monkeypatch.setattr(os, "kill", refused)
    assert open_run(tmp_path).notes == []


def test_latest_opens_the_run_it_points_to_now(tmp_path: Path) -> None:
    for name in ("first", "second"):
        finished(tmp_path / name)
    update_latest(tmp_path / "first")
    run = open_run(tmp_path / "latest")
    update_latest(tmp_path / "second")
    assert run.path == tmp_path / "first"


@pytest.mark.parametrize(
    ("rows", "task", "split"),
    [
        (["val"], {"name": "train"}, "val"),
        (["val", "train"], {"name": "train"}, "train"),
        (["val", None], {"name": "train", "split": "train"}, "val"),
        ([None], {"name": "predict", "split": "val"}, "val"),
        ([], {"name": "evaluate", "split": "val"}, "val"),
        ([], {"name": "train"}, "train"),
    ],
)
def test_labels_are_those_of_the_rows_split(
    rows: list[Split | None], task: dict[str, str], split: Split, tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path)
    for place, each in enumerate(rows):
        run.captures.add("h", f"m{place}", torch.ones(3, 1), sample_ids=[0, 1, 2], **AT, split=each)
    run.close()
    run.set_status("done")
    config = {"task": task, "data": {"name": "digits"}, "seed": 3}
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(json.dumps(config))
    samples = data.load(Data(name="digits"), split, seed=3)
    labels = open_run(tmp_path).labels(torch.arange(40))
    assert labels.tolist() == [int(samples[number][1]) for number in range(40)]


class TestWhatIsNoRun:
    def refused(self, path: Path) -> str:
        with pytest.raises(StoreError) as caught:
            open_run(path)
        return str(caught.value)

    def test_a_sweep_directory_names_its_jobs(self, tmp_path: Path) -> None:
        for number in range(12):
            finished(tmp_path / str(number))
        (tmp_path / "multirun.yaml").write_text("")
        said = self.refused(tmp_path)
        assert said.startswith(f"{tmp_path} is a sweep of 12 runs: 0, 1, 2, 3, ")
        assert said.endswith(f"Open one of them: open_run('{tmp_path}/11')")

    def test_a_folder_of_runs_names_them(self, tmp_path: Path) -> None:
        finished(tmp_path / "2025-01-01_12-00-00-000001")
        update_latest(tmp_path / "2025-01-01_12-00-00-000001")
        assert self.refused(tmp_path) == (
            f"{tmp_path} is a folder of 2 runs: 2025-01-01_12-00-00-000001, latest\n"
            f"Open one of them: open_run('{tmp_path}/latest')"
        )

    def test_another_directory_is_an_error_with_its_content(self, tmp_path: Path) -> None:
        assert (
            self.refused(tmp_path) == f"{tmp_path} is not a run directory: it has no status.json; it is empty"
        )
        (tmp_path / ".hydra").mkdir()
        assert self.refused(tmp_path).endswith("it is with .hydra")

    def test_a_missing_path_is_an_error_with_the_nearest_existing_one(self, tmp_path: Path) -> None:
        (tmp_path / "outputs").mkdir()
        assert self.refused(tmp_path / "output" / "latest") == (
            f"there is no {tmp_path}/output/latest; the nearest directory is {tmp_path}, with outputs"
        )

    def test_a_file_is_not_a_run_directory(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("")
        assert self.refused(tmp_path / "x").startswith(f"{tmp_path}/x is a file, not a run directory")

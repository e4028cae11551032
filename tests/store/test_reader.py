"""A run directory is read back as it was written; another directory is an error with the next step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils.data import DataLoader

import hookrun
from hookrun import data
from hookrun.cli import main
from hookrun.data import Split
from hookrun.data.settings import Data
from hookrun.store.captures.read import StoredCapture
from hookrun.store.files import StoreError
from hookrun.store.reader import Run, open_run
from hookrun.store.run_dir import RunDir, update_latest
from hookrun.studies.compare import comparison

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
    run.write("plan.json", PLAN)
    run.write("env.json", {"python": "3.11"})
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
    assert found.status["status"] == "done"
    assert found.status["exit_code"] == 0
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
    run.write("plan.json", PLAN)
    run.captures.add("features", "layer4", torch.ones(1), sample_ids=None, **AT)
    run.captures.close()
    modules = open_run(tmp_path).captures["features"]
    assert modules["body.last"] is modules["layer4"]


def test_predictions_may_be_a_container(tmp_path: Path) -> None:
    run = finished(tmp_path)
    run.predictions.add("predictions", "output", {"boxes": torch.ones(1)}, sample_ids=[0], **AT)
    run.predictions.close()
    found = open_run(tmp_path).predictions
    assert found is not None
    assert not isinstance(found, StoredCapture)
    assert found["boxes"][0].tolist() == 1


def test_a_run_without_records_can_be_read(tmp_path: Path) -> None:
    finished(tmp_path)
    run = open_run(str(tmp_path))
    assert run.metrics == run.stats == []
    assert run.plan == run.env == dict(run.captures) == {}
    assert run.predictions is None


def test_the_status_is_read_again_while_the_run_continues(tmp_path: Path) -> None:
    writing = RunDir.create(tmp_path)
    writing.set_status("running")
    run = open_run(tmp_path)
    assert run.status["status"] == "running"
    assert run.notes == []
    writing.set_status("stopped", "check nan_hunt tripped")
    assert run.status["status"] == "stopped"
    assert run.status["exit_code"] == 3


def test_a_run_that_was_cut_off_can_be_read(tmp_path, monkeypatch) -> None:
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


def sweep(path: Path) -> None:
    for number in range(12):
        finished(path / str(number))
    (path / "multirun.yaml").write_text("")


def folder_of_runs(path: Path) -> None:
    finished(path / "b")
    update_latest(path / "b")


def several_runs(path: Path) -> None:
    finished(path / "a")
    folder_of_runs(path)


@pytest.mark.parametrize(
    ("make", "opened", "begins", "ends"),
    [
        (sweep, "", "HERE is a sweep of 12 runs: 0, 1, 2, 3, ", "Open one of them: open_run('HERE/11')"),
        (folder_of_runs, "", "HERE is a folder of 1 runs: b\n", "Open one of them: open_run('HERE/b')"),
        (several_runs, "", "HERE is a folder of 2 runs: a, b\n", "Open one of them: open_run('HERE/b')"),
        (lambda path: None, "", "HERE is not a run directory: it has no status.json", "; it is empty"),
        (lambda path: (path / ".hydra").mkdir(), "", "HERE is not a run directory", "it is with .hydra"),
        (
            lambda path: (path / "0.safetensors").touch(),
            "",
            "HERE is not a run directory",
            'are read with rows: {pattern: "*.safetensors", key: "layers.*"}',
        ),
        (
            lambda path: (path / "outputs").mkdir(),
            "output/latest",
            "there is no HERE/output/latest; ",
            "the nearest directory is HERE, with outputs",
        ),
        (lambda path: (path / "x").touch(), "x", "HERE/x is a file, not a run directory", "holds status.json"),
    ],
    ids=[
        "a sweep", "a folder of a run", "a folder of runs", "an empty folder", "another folder", "tensors",
        "nothing", "a file",
    ],
)  # fmt: skip
def test_what_is_no_run_is_named_with_the_next_step(
    make: Callable[[Path], object], opened: str, begins: str, ends: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(StoreError) as refused:
        open_run(tmp_path / opened)
    said = str(refused.value).replace(str(tmp_path), "HERE")
    assert said.startswith(begins)
    assert said.endswith(ends)


HOOKS = (
    "+hooks.seen={select: [layers.1,fc], hook: forward, action: capture}",
    "+hooks.half={select: fc, hook: forward, action: capture, dtype: bfloat16}",
    "+hooks.pre={select: fc, hook: forward_pre, action: capture}",
    "+hooks.st={select: fc, hook: forward, action: stats}",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run") / "run"
    command = (
        "model=mlp", "task=predict", "compute.device=cpu", "data.batch_size=50", f"hydra.run.dir={folder}",
    )  # fmt: skip
    assert main([*command, *HOOKS]) == 0
    return hookrun.open_run(folder)


def test_numpy(run: Run) -> None:
    capture = run.captures["seen"]["fc"]
    assert capture.numpy().dtype == np.float32
    assert np.array_equal(capture.numpy(slice(2, 9, 3)), capture[2:9:3].numpy())
    half = run.captures["half"]["fc"]
    assert half.dtype == torch.bfloat16
    assert np.array_equal(half.numpy([5, 1]), half[[5, 1]].float().numpy())


def test_batches(run: Run) -> None:
    capture = run.captures["seen"]["fc"]
    batches = list(capture.batches(100))
    assert [len(batch) for batch in batches] == [100, 100, 100, 59]
    assert_close(torch.cat(batches), capture[:])


def test_a_data_set_for_training_a_probe(run: Run) -> None:
    capture = run.captures["seen"]["layers.1"]
    dataset = run.dataset(capture)
    assert isinstance(dataset, torch.utils.data.Dataset)
    rows, labels = next(iter(DataLoader(dataset, batch_size=16)))
    assert_close(rows, capture[:16])
    assert_close(labels, run.labels(torch.arange(16)))
    assert sorted(set(run.labels(capture.sample_ids).tolist())) == list(range(10))
    with pytest.raises(IndexError, match="no row 359, there are 359"):
        dataset[359]


def test_one_merged_file(run: Run, tmp_path: Path) -> None:
    keys = run.export(tmp_path / "all.safetensors")
    merged = load_file(tmp_path / "all.safetensors")
    assert sorted(keys) == sorted(merged)
    assert_close(merged["seen/layers.1"], run.captures["seen"]["layers.1"][:])
    assert merged["seen/fc.sample_ids"].tolist() == list(range(359))
    assert merged["half/fc"].dtype == torch.bfloat16


def test_lines_are_given_as_a_table_of_pandas_or_arrow(run: Run) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = run.table("stats")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["norm"].tolist() == [line["norm"] for line in run.stats]
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    assert isinstance(run.table("metrics", "arrow"), arrow.Table)


def test_metrics_of_whole_passes_are_compared() -> None:
    lines: list[dict[str, Any]] = [
        {"split": "val", "of": "epoch", "ok": True, "loss": 2.0, "note": "x"},
        {"split": "val", "of": "epoch", "ok": False},
        {"split": "train", "of": "batch", "loss": 1.0},
        {"split": "lens", "of": "sample", "kl": 3.0},
        {"split": "probe", "module": "fc", "accuracy": 0.5},
    ]
    expected = {"probe/accuracy fc": 0.5, "val/loss": 2.0, "val/ok": 0.0}
    assert comparison.metrics(lines) == expected


def test_a_library_that_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(hookrun.HookrunError, match="pandas is not installed: pip install pandas"):
        run.table()


def test_a_run_without_its_configuration_has_no_labels(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not say which data was used"):
        Run(tmp_path).labels(torch.arange(3))


def test_only_formats_of_tensors_can_be_exported(run: Run, tmp_path: Path) -> None:
    with pytest.raises(hookrun.HookrunError, match=r"as \.safetensors, not rows\.csv"):
        run.export(tmp_path / "rows.csv")
    assert not (tmp_path / "rows.csv").exists()


def test_an_export_reads_a_block_of_rows_at_a_time(run, tmp_path, monkeypatch) -> None:
    run.export(tmp_path / "whole.safetensors")
    read = StoredCapture.__getitem__
    most = list[int]()

    def counted(self: StoredCapture, index: slice) -> torch.Tensor:
        rows = read(self, index)
        most.append(len(rows))
        return rows

    monkeypatch.setattr(StoredCapture, "__getitem__", counted)
    monkeypatch.setattr("hookrun.store.reader.ROWS_AT_ONCE", 50)
    run.export(tmp_path / "parts.safetensors")
    assert max(most) == 50
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()

"""Captures in the formats of other libraries: NumPy, pandas, Arrow, one file, a data set with labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils.data import DataLoader

import hookrun
from hookrun.cli import main
from hookrun.store.captures import StoredCapture
from hookrun.store.files import StoreError
from hookrun.store.reader import Run

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
        "model=mlp",
        "task=predict",
        "compute.device=cpu",
        "data.batch_size=50",
        f"hydra.run.dir={folder}",
    )
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


def test_pandas(run: Run) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = run.table("stats")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["norm"].tolist() == [line["norm"] for line in run.stats]


def test_arrow(run: Run) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    assert isinstance(run.table("metrics", "arrow"), arrow.Table)


def test_a_library_that_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(hookrun.HookrunError, match="pandas is not installed: pip install pandas"):
        run.table()


def test_a_run_without_its_configuration_has_no_labels(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not say which data it used"):
        Run(tmp_path).labels(torch.arange(3))


def test_only_formats_of_tensors_can_be_exported(run: Run, tmp_path: Path) -> None:
    with pytest.raises(hookrun.HookrunError, match=r"as \.safetensors, not rows\.csv"):
        run.export(tmp_path / "rows.csv")
    assert not (tmp_path / "rows.csv").exists()


def test_an_export_reads_a_block_of_rows_at_a_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.export(tmp_path / "whole.safetensors")
    read, most = StoredCapture.__getitem__, list[int]()

    def counted(self: StoredCapture, index: slice) -> torch.Tensor:
        rows = read(self, index)
        most.append(len(rows))
        return rows

    monkeypatch.setattr(StoredCapture, "__getitem__", counted)
    monkeypatch.setattr("hookrun.store.exports.ROWS_AT_ONCE", 50)
    run.export(tmp_path / "parts.safetensors")
    assert max(most) == 50
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()

"""Captured rows are written for other programs, bit for bit, whole or not at all."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
import torch
from pyarrow import ipc, parquet

import hookrun
from hookrun.store import export
from hookrun.store.reader import Run
from hookrun.store.run_dir import RunDir

AT: dict[str, Any] = {"epoch": 0, "step": 0, "call": 0}
VALUES = torch.randn(100, 2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Captures of one dtype each, a container, and complex numbers."""
    made = RunDir.create(tmp_path_factory.mktemp("run") / "run", buffer=12_000)
    made.set_status("running")
    made.append("samples.jsonl", [{"split": "val", "sample": 7, "file": "a.png", "class": "cat"}])
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool"):
        rows = (VALUES * 3).abs().to(getattr(torch, name))
        made.captures.add(name, "fc", rows, sample_ids=range(100), split="val", **AT)
    made.captures.add("pair", "lstm", (VALUES[:2], VALUES[2:4]), sample_ids=[0, 1], **AT)
    made.captures.add("complex", "", VALUES[:2].to(torch.complex64), sample_ids=[0, 1], **AT)
    made.close()
    made.set_status("done")
    return hookrun.open_run(made.path)


def vectors(table: Any, rows: torch.Tensor) -> torch.Tensor:
    flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.copy()).reshape(rows.shape)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int64", "uint8", "bool"])
def test_arrow_and_parquet_hold_the_same_bits(run: Run, tmp_path: Path, name: str) -> None:
    rows = run.captures[name]["fc"][:]
    assert run.export(tmp_path / "rows.parquet", name) == [f"{name}/fc"]
    run.export(tmp_path / "rows.arrow", name, "fc")
    for table in (
        parquet.read_table(tmp_path / "rows.parquet"),
        ipc.open_file(tmp_path / "rows.arrow").read_all(),
    ):
        assert table.schema.field("vector").type.list_size == 6
        found = vectors(table, rows)
        assert found.dtype == rows.dtype
        assert found.numpy().tobytes() == rows.numpy().tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_what_arrow_lacks_becomes_float32_and_says_so(run: Run, tmp_path: Path, name: str) -> None:
    run.export(tmp_path / "rows.parquet", name)
    table = parquet.read_table(tmp_path / "rows.parquet")
    rows = run.captures[name]["fc"][:].float()
    assert torch.equal(vectors(table, rows), rows)
    assert json.loads(table.schema.metadata[b"hookrun"]) == {"dtype": name, "shape": [2, 3]}


def test_pandas_reads_what_stands_beside_the_vector(run: Run, tmp_path: Path) -> None:
    run.export(tmp_path / "rows.parquet", "float32")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert frame["sample"].tolist() == list(range(100))
    assert set(frame["split"]) == {"val"}
    assert set(frame["hook"] + " " + frame["module"]) == {"float32 fc"}
    assert frame.loc[7, ["file", "class"]].tolist() == ["a.png", "cat"]
    assert frame[["file", "class"]].isna().sum().tolist() == [99, 99]
    assert frame["position"].isna().all()


def test_a_row_group_has_bounded_size(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_GROUP_BYTES", 24 * 30)
    run.export(tmp_path / "rows.parquet", "float32")
    file = parquet.ParquetFile(tmp_path / "rows.parquet")
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert sizes == [30, 30, 30, 10]
    rows = run.captures["float32"]["fc"][:]
    assert torch.equal(vectors(file.read(), rows), rows)


def test_tensors_of_a_container_follow_each_other(run: Run, tmp_path: Path) -> None:
    assert run.export(tmp_path / "rows.parquet", "pair") == ["pair/lstm/[0]", "pair/lstm/[1]"]
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table["path"].to_pylist() == ["[0]", "[0]", "[1]", "[1]"]
    assert torch.equal(vectors(table, VALUES[:4]), VALUES[:4])
    assert run.export(tmp_path / "one.parquet", "pair", "lstm [1]") == ["pair/lstm/[1]"]


def test_a_folder_gets_a_file_for_each_capture(tmp_path: Path) -> None:
    run = run_with(tmp_path, {("seen", "wide"): torch.ones(3, 5), ("seen", ""): torch.ones(3, 2)})
    assert run.export(tmp_path / "rows") == ["seen/wide", "seen/"]
    tables = [parquet.read_table(path) for path in sorted((tmp_path / "rows").iterdir())]
    assert [table["module"][0].as_py() for table in tables] == ["wide", ""]
    assert [table.schema.field("vector").type.list_size for table in tables] == [5, 2]
    with pytest.raises(hookrun.HookrunError, match=r"several kinds.*or a folder"):
        run.export(tmp_path / "both.parquet")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.safetensors"])
def test_a_file_that_is_there_is_replaced(run: Run, tmp_path: Path, name: str) -> None:
    run.export(tmp_path / name, "uint8")
    before = (tmp_path / name).read_bytes()
    run.export(tmp_path / name, "float32")
    assert (tmp_path / name).read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_only_an_empty_folder_is_filled(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    run.export(tmp_path / "rows", "uint8")
    before = (tmp_path / "rows/000000.parquet").read_bytes()
    with pytest.raises(hookrun.HookrunError, match="a folder that is not empty: give another name"):
        run.export(tmp_path / "rows", "float32")
    assert (tmp_path / "rows/000000.parquet").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_a_module_is_found_at_any_hook(tmp_path: Path) -> None:
    run = run_with(tmp_path, {("first", "fc1"): torch.ones(3, 2), ("second", "fc2"): torch.ones(3, 2)})
    assert run.export(tmp_path / "rows.parquet", module="fc2") == ["second/fc2"]
    with pytest.raises(hookrun.HookrunError, match=r"'first', 'second': did you mean 'fc\d'"):
        run.export(tmp_path / "rows.parquet", module="fc3")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "folder"])
def test_a_full_disk_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "start_flushing", full)
    with pytest.raises(hookrun.HookrunError, match="No space left on device"):
        run.export(tmp_path / name, "float32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("capture", "module", "says"),
    [
        ("float23", None, r"no hook 'float23'.*did you mean 'float32'"),
        ("float32", "fcc", r"no module 'fcc'.*did you mean 'fc'"),
        ("complex", None, r"Arrow has no type for a row of complex64 \[2, 3\]: export it as \.safetensors"),
    ],
)
def test_what_cannot_be_exported_is_named(
    run: Run, tmp_path: Path, capture: str, module: str | None, says: str
) -> None:
    with pytest.raises(hookrun.HookrunError, match=says):
        run.export(tmp_path / "rows.parquet", capture, module)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_pyarrow_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(hookrun.HookrunError, match="pyarrow is not installed: pip install pyarrow"):
        run.export(tmp_path / "rows.parquet")
    assert pyarrow.__version__


def run_with(folder: Path, rows: Mapping[tuple[str, str], torch.Tensor]) -> Run:
    """A run with the rows of each hook and module."""
    made = RunDir.create(folder / "run")
    made.set_status("running")
    for (hook, module), values in rows.items():
        made.captures.add(hook, module, values, sample_ids=range(len(values)), **AT)
    made.close()
    return hookrun.open_run(made.path)

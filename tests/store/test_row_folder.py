"""A folder of safetensors of another program is read as what was captured; what is not clear is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hookrun
from hookrun.store.row_folder import open_folder
from hookrun.store.run_dir import RunDir

KEYS = {"pattern": "*.safetensors", "key": "layers.*"}
SIZES = {"req-10": 3, "req-2": 2, "req-1": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, which are in natural order req-1, req-2, req-10."""
    folder = tmp_path / "acts"
    folder.mkdir()
    for number, (name, rows) in enumerate(SIZES.items()):
        layers = {f"layers.{layer}": torch.full((rows, 2 + layer), number + layer / 4) for layer in range(2)}
        save_file({**layers, "ids": torch.arange(rows)}, folder / f"{name}.safetensors")
    return folder


def test_files_follow_each_other_in_natural_order(folder: Path) -> None:
    capture = open_folder(folder, KEYS).captures["acts"]["layers.0"]
    assert capture[:].tolist() == [[2.0, 2.0]] * 4 + [[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 3
    assert capture.sample_ids.tolist() == list(range(9))
    assert capture.files[4:6] == ["req-2.safetensors"] * 2


def test_a_file_may_be_one_sample_of_tokens(folder: Path) -> None:
    capture = open_folder(folder, {**KEYS, "each_file": "tokens"}).captures["acts"]["layers.1"]
    assert capture.sample_ids.tolist() == [0] * 4 + [1] * 2 + [2] * 3
    assert capture.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert capture.shape == (9, 3)


def test_each_tensor_may_be_one_row(tmp_path: Path) -> None:
    for number in range(3):
        save_file({"mean": torch.full((4,), float(number))}, tmp_path / f"{number}.safetensors")
    keys = {"pattern": "*.safetensors", "key": "mean"}
    run = open_folder(tmp_path, {**keys, "each_file": "sample"})
    assert run.captures[tmp_path.name]["mean"][:].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    with pytest.raises(hookrun.HookrunError, match=r"has the shape \[4\].*say each_file: sample"):
        open_folder(tmp_path, keys)


def test_tensors_may_be_divided_among_files(tmp_path: Path) -> None:
    for layer in range(2):
        save_file({f"layers.{layer}": torch.ones(5, 2) * layer}, tmp_path / f"{layer}.safetensors")
    modules = open_folder(tmp_path, KEYS).captures[tmp_path.name]
    assert [modules[name].sample_ids.tolist() for name in modules] == [[0, 1, 2, 3, 4]] * 2


def test_rows_of_a_folder_are_shuffled_and_exported(folder: Path, tmp_path: Path) -> None:
    rows = hookrun.rows(folder, "acts", "layers.0", rows=KEYS)
    assert sorted(float(row[0]) for row in rows) == [0.0] * 3 + [1.0] * 2 + [2.0] * 4
    open_folder(folder, KEYS).export(tmp_path / "rows.parquet", module="layers.1")
    assert (tmp_path / "rows.parquet").exists()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"pattern": "*.safetensor"}, r"no file of .* matches .*did you mean 'req-"),
        ({"key": "layer.*"}, r"no tensor .* matches 'layer\.\*': did you mean 'layers"),
        ({"key": "ids"}, r"'ids' has the shape \["),
        ({"pattern": "../*"}, "expected a path below the folder"),
        ({"pattern": "./"}, "expected a path below the folder"),
        ({"pattern": "**.safetensors"}, r"\*\* stands alone between slashes"),
        ({"key": "a["}, r"rows\.key: found 'a\['"),
        ({"each_file": "token"}, "did you mean 'tokens'"),
        ({"files": 1}, r"rows\.files: unknown key"),
    ],
)
def test_keys_that_choose_nothing_are_refused(folder: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(hookrun.HookrunError, match=says):
        open_folder(folder, KEYS | keys)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"layers.0": torch.ones(2, 5)}, r"req-3\.safetensors: the rows of 'layers\.0'.*req-1\.safetensors"),
        ({"layers.0": torch.ones(2, 2).half()}, "float16"),
        ({"layers.0": torch.ones(2, 0)}, r"the shape \[2, 0\], which is not one of rows of numbers"),
        ({"layers.1": torch.ones(9, 3), "layers.0": torch.ones(2, 2)}, "same number of rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(folder: Path, tensors: Any, says: str) -> None:
    save_file(tensors, folder / "req-3.safetensors")
    with pytest.raises(hookrun.HookrunError, match=says):
        open_folder(folder, KEYS)


def test_a_tensor_that_a_file_lacks_is_refused(folder: Path) -> None:
    save_file({"layers.0": torch.ones(2, 2)}, folder / "req-3.safetensors")
    with pytest.raises(hookrun.HookrunError, match=r"req-10\.safetensors: layers\.0, layers\.1 do not have"):
        open_folder(folder, KEYS)


def test_links_pipes_and_junk_are_refused(folder: Path) -> None:
    odd = folder / "odd.safetensors"
    odd.symlink_to("/etc/hostname")
    with pytest.raises(hookrun.HookrunError, match="it is a link"):
        open_folder(folder, KEYS)
    odd.unlink()
    os.mkfifo(odd)
    with pytest.raises(hookrun.HookrunError, match="it is a pipe"):
        open_folder(folder, KEYS)
    odd.unlink()
    odd.write_bytes(b"\xff" * 100)
    with pytest.raises(hookrun.HookrunError, match=r"odd\.safetensors is not a whole safetensors file"):
        open_folder(folder, KEYS)


def test_names_with_controls_are_printed_as_escapes(tmp_path: Path) -> None:
    save_file({"a\x1b[31m": torch.ones(3)}, tmp_path / "x\x1b[31m.safetensors")
    with pytest.raises(hookrun.HookrunError) as error:
        open_folder(tmp_path, {"pattern": "*", "key": "**"})
    assert "\x1b" not in str(error.value)
    assert "\\x1b[31m" in str(error.value)


def test_files_named_like_those_of_a_run_are_not_read(folder: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl", "plan.json", "model.json"):
        (folder / name).write_text("not JSON\n")
    run = open_folder(folder, KEYS)
    assert (run.metrics, run.plan, run.model, run.config) == ([], {}, {}, {})
    assert run.captures["acts"]["layers.0"].text == [""] * 9


def test_a_folder_is_compared_with_a_run_of_one_split(folder: Path, tmp_path: Path) -> None:
    made = RunDir.create(tmp_path / "run")
    made.set_status("running")
    stored = open_folder(folder, KEYS).captures["acts"]
    for module in stored:
        made.captures.add(
            "features", module, stored[module][:], sample_ids=range(9), split="val", epoch=0, step=0, call=0
        )
    made.close()
    made.set_status("done")
    run = hookrun.open_run(made.path)
    comparison = run.compare(open_folder(folder, KEYS).like(run))
    assert [row["rows"] for row in comparison.captures] == [9, 9]
    assert (comparison.first, comparison.unpaired, comparison.reasons) == (None, [], [])

"""The user's own tensors: any names, one input or several, with a target or without, from one file or two."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.data import default_collate

from hookrun.data import Split, describe, load
from hookrun.data.info import TensorInfo
from hookrun.data.settings import Data
from hookrun.data.tensors import read_header, read_tensors
from hookrun.errors import Problem, SpecError

ROWS = 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """x.safetensors and x.npz: row i of `input` is [i, i], its `target` i mod 3; and tensors of other kinds."""
    number = torch.arange(ROWS)
    tensors = {
        "input": torch.stack([number, number], 1).float(), "target": number % 3, "double": number.double(),
        "half": number.half(), "bytes": (number % 3).to(torch.uint8), "flags": number > 4,
        "images": torch.zeros(ROWS, 1, 8, 8), "short": torch.zeros(3), "number": torch.tensor(1.0),
        "none": torch.zeros(0, 2),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    return tmp_path


@pytest.mark.parametrize("file", ["x.safetensors", "x.npz"])
def test_row_i_of_the_file_is_a_sample(root: Path, file: str) -> None:
    config = section(root, file=file, val_fraction=1.0)
    samples = pickle.loads(pickle.dumps(load(config, "val", seed=0)))  # as for worker processes
    assert [(x.tolist(), int(y)) for x, y in samples] == [([i, i], i % 3) for i in range(ROWS)]  # type: ignore[attr-defined]
    info = describe(config, "val")
    assert info.shape == (2,)
    assert info.dtype == torch.float32
    assert info.target == TensorInfo((), torch.int64)
    assert info.sizes == {"train": 0, "val": ROWS}


def test_a_fraction_of_one_file_is_for_validation(root: Path) -> None:
    config = section(root, file="x.npz", val_fraction=0.3)
    train = first_values(config, "train")
    val = first_values(config, "val")
    assert sorted(train + val) == list(range(ROWS))
    assert train == sorted(train)
    assert val == sorted(val)
    assert describe(config).sizes == {"train": len(train), "val": len(val)} == {"train": 7, "val": 3}


def test_each_of_two_files_is_a_split(root: Path) -> None:
    save_file(
        {"input": torch.full((2, 2), 7.0), "target": torch.zeros(2, dtype=torch.int64)},
        root / "val.safetensors",
    )
    config = section(root, train_file="x.npz", val_file="val.safetensors")
    assert first_values(config, "train") == list(range(ROWS))
    assert first_values(config, "val") == [7, 7]
    assert describe(config).sizes == {"train": ROWS, "val": 2}
    one = section(root, val_file="x.npz")
    assert describe(one, "val").sizes == {"train": 0, "val": ROWS}
    assert wheres(one, "train") == ["data.args.train_file"]
    ((where, what),) = problems(section(root, train_file="x.npz", input="none", target=None))
    assert where == "data.args.train_file"
    assert what == f"{root / 'x.npz'} has no rows"


def test_file_names_start_at_the_root_or_the_working_directory(root, monkeypatch) -> None:
    monkeypatch.chdir(root)
    for config in (
        Data(name="tensors", args={"file": "x.npz"}),
        Data(name="tensors", args={"file": str(root / "x.npz")}),
        Data(name="tensors", root=str(root / "elsewhere"), args={"file": str(root / "x.npz")}),
    ):
        assert describe(config).sizes["train"] == 8


@pytest.mark.parametrize(
    ("args", "dtype", "target_dtype"),
    [
        ({"input": "double", "target": "half"}, torch.float32, torch.float32),
        ({"input": "half", "target": "double", "dtype": None}, torch.float16, torch.float64),
        ({"input": "flags", "target": "bytes"}, torch.bool, torch.int64),
        ({"input": "double", "target": "flags"}, torch.float32, torch.bool),
    ],
)
def test_integer_targets_become_labels(
    root: Path, args: dict[str, Any], dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    config = section(root, file="x.npz", **args)
    info = describe(config)
    value, target = load(config, "train", seed=0)[0]
    assert isinstance(value, torch.Tensor)
    assert info.target is not None
    assert (info.dtype, info.target.dtype) == (value.dtype, target.dtype) == (dtype, target_dtype)


def test_bytes_are_divided_by_the_scale_in_float32(root: Path) -> None:
    config = section(root, file="x.npz", input=["bytes", "input"], target="bytes", scale=255, num_classes=3)
    info = describe(config)
    samples = load(config, "val", seed=0)
    assert isinstance(info.inputs, dict)
    assert info.num_classes == 3
    assert info.inputs["bytes"].dtype == torch.float32
    assert info.inputs["input"].dtype == torch.float32
    with np.load(root / "x.npz") as arrays:
        for number in range(len(samples)):
            inputs, target = samples[number]
            row = int(samples.file(number).partition("[")[2][:-1])
            expected = torch.as_tensor(arrays["bytes"][row]).float() / 255
            assert torch.equal(inputs["bytes"], expected)
            assert torch.equal(target, torch.as_tensor(arrays["bytes"][row]).long()), "a label is not divided"
            assert torch.equal(inputs["input"], torch.as_tensor(arrays["input"][row]).float())


@pytest.mark.parametrize(
    ("args", "where", "says"),
    [
        ({"input": "bytes"}, "data.args.scale", "uint8 inputs: bytes"),
        ({"input": ["input", "bytes"]}, "data.args.scale", "uint8 inputs: bytes"),
        ({"input": "double", "scale": 255}, "data.args.scale", "divides uint8 inputs, and found double torch.float64"),
        ({"input": "bytes", "scale": 0}, "data.args.scale", "greater than 0"),
        ({"target": "double", "num_classes": 3}, "data.args.target", "data.args.num_classes=3 says that it is a label"),
    ],
)  # fmt: skip
def test_bytes_need_a_scale(root: Path, args: dict[str, Any], where: str, says: str) -> None:
    ((found, what),) = problems(section(root, file="x.npz", **args))
    assert found == where
    assert says in what


def test_several_inputs_come_by_name(root: Path) -> None:
    config = section(root, file="x.npz", input=["input", "images"])
    info = describe(config)
    batch, _ = default_collate([load(config, "train", seed=0)[i] for i in range(4)])
    example = info.example(4)
    assert isinstance(example, dict)
    assert set(batch) == set(example)
    for name, tensor in batch.items():
        assert tensor.shape == example[name].shape
        assert tensor.dtype == example[name].dtype
    one, _ = load(section(root, file="x.npz", input=["input"]), "train", seed=0)[0]
    assert isinstance(one, dict)
    assert list(one) == ["input"]


def test_without_a_target_the_batch_of_targets_is_empty(root: Path) -> None:
    config = section(root, file="x.npz", target=None)
    info = describe(config)
    assert info.target is None
    _, targets = default_collate([load(config, "train", seed=0)[i] for i in range(4)])
    assert torch.equal(targets, info.example_target(4))


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"file": "x.npz", "val_file": "x.npz"},
        {"file": "x.npz", "input": []},
        {"file": "x.npz", "input": ["a", "a"]},
    ],
)
def test_contradictory_arguments_are_refused(root: Path, args: dict[str, Any]) -> None:
    assert wheres(section(root, **args)) == ["data.args"]


def test_a_missing_tensor_is_reported_with_the_nearest_names(root: Path) -> None:
    config = section(root, file="x.npz", input="inputs", target="labels")
    first, second = problems(config)
    assert first[0] == "data.args.input"
    assert "did you mean 'input'" in first[1]
    assert second[0] == "data.args.target"
    assert str(root / "x.npz") in second[1]


@pytest.mark.parametrize(
    ("args", "where", "what"),
    [
        ({"input": "number"}, "data.args.input", "is a single number"),
        (
            {"input": "short"},
            "data.args.file",
            "differ in their number of rows: short [3] float32, target [10] int64",
        ),
        ({"input": "none", "target": None}, "data.args.val_fraction", "has 0 rows"),
        ({"val_fraction": 1.0}, "data.args.val_fraction", "none is for the split 'train'"),
        ({"input": "words"}, "data.args.input", "of a type that is not supported"),
    ],
)
def test_tensors_that_are_not_rows_of_samples_are_refused(
    root: Path, args: dict[str, Any], where: str, what: str
) -> None:
    with np.load(root / "x.npz") as arrays:
        np.savez(root / "y.npz", words=np.asarray(["a"] * ROWS), **arrays)
    (found,) = problems(section(root, file="y.npz", **args))
    assert found[0] == where
    assert what in found[1]


def test_mistakes_in_both_files_are_found_at_once(root: Path) -> None:
    np.savez(root / "val.npz", input=np.zeros((4, 5)), target=np.zeros(4))
    ((where, what),) = problems(section(root, train_file="x.npz", val_file="val.npz"))
    assert where == "data.args.val_file"
    assert "input [2] float32" in what
    assert "input [5] float64" in what
    assert wheres(section(root, train_file="a.npz", val_file="b.npz")) == [
        "data.args.train_file",
        "data.args.val_file",
    ]


WHERE = "data.args.file"
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    else:
        save_file(tensors, path)
    return path


def damage(path: Path) -> Problem:
    with pytest.raises(SpecError) as caught:
        read_tensors(path, WHERE, read_header(path, WHERE))
    (problem,) = caught.value.errors
    assert problem.where == WHERE
    assert str(path) in problem.what
    return problem


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@given(
    tensors=st.dictionaries(st.sampled_from("abc"), st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1)
)
def test_a_header_tells_what_the_file_holds(suffix: str, tensors, tmp_path_factory) -> None:
    saved = {
        name: torch.ones(shape, dtype=dtype)
        for name, (shape, dtype) in tensors.items()
        if suffix != ".npz" or dtype is not torch.bfloat16  # NumPy does not have it
    }
    path = save(tmp_path_factory.mktemp("file") / f"x{suffix}", saved)
    assert read_header(path, WHERE) == {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in saved.items()}
    loaded = read_tensors(path, WHERE, saved)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
    assert read_tensors(path, WHERE, list(saved)[:1]).keys() == set(list(saved)[:1])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_arrays_of_any_byte_order_are_read(tmp_path: Path, order: str, layout: str) -> None:
    array = np.asarray([[1, 2, 3], [4, 5, 6]], dtype=f"{order}f4", order=layout)  # type: ignore[call-overload]
    np.savez_compressed(tmp_path / "x.npz", a=array)
    assert read_header(tmp_path / "x.npz", WHERE) == {"a": TensorInfo((2, 3), torch.float32)}
    assert read_tensors(tmp_path / "x.npz", WHERE, "a")["a"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_arrays_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(
        path, objects=np.asarray([{}, []], dtype=object), words=np.asarray(["a"]),
        fields=np.zeros(1, dtype=[("a", "f4")]), complex=np.zeros(1, dtype=np.complex64), good=np.zeros(1),
    )  # fmt: skip
    header = read_header(path, WHERE)
    assert [name for name, info in header.items() if info] == ["good"]
    with pytest.raises(SpecError, match="allow_pickle=False"):
        read_tensors(path, WHERE, ["objects"])


def test_files_of_other_kinds_are_never_opened(tmp_path: Path) -> None:
    for name, what in (("x.npz", "there is no file"), ("x.pt", "does not end in .safetensors or .npz")):
        ((where, said),) = problems(section(tmp_path, file=name))
        assert where == WHERE
        assert what in said


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("part", ["empty", "nonsense", "half"])
def test_a_broken_file_is_an_error_at_its_key(tmp_path: Path, suffix: str, part: str) -> None:
    path = save(tmp_path / f"x{suffix}", {"a": torch.rand(100)})
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "nonsense": b"nonsense" * 20, "half": whole[: len(whole) // 2]}[part])
    assert f"cannot be read as {suffix[1:]}" in damage(path).what


def test_a_cut_off_file_says_how_its_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, input=np.zeros((4, 2), np.float32))
    content = bytearray(path.read_bytes())
    entry = content.rfind(b"PK\x01\x02")
    struct.pack_into("<II", content, entry + 20, 10**6, 10**6)  # both of its sizes
    path.write_bytes(content)
    assert damage(path).what.endswith("x.npz cannot be read as npz: EOFError")


def test_damage_behind_a_good_header_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", {"a": torch.rand(100_000)})
    damaged = bytearray(path.read_bytes())
    damaged[200_000] ^= 0xFF
    path.write_bytes(damaged)
    assert read_header(path, WHERE) == {"a": TensorInfo((100_000,), torch.float32)}
    assert "Bad CRC-32" in damage(path).what


def test_only_two_versions_of_numpy_s_format_are_read(tmp_path: Path) -> None:
    for version in ((1, 0), (2, 0)):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ones(2), version=version)
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("a.npy", buffer.getvalue())
        assert read_header(tmp_path / "x.npz", WHERE) == {"a": TensorInfo((2,), torch.float64)}
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x09\x00" + bytes(120))
    assert "(9, 0) is not supported" in damage(tmp_path / "x.npz").what


def test_an_encrypted_archive_is_an_error_at_its_key(tmp_path: Path) -> None:
    path = tmp_path / "secret.npz"
    np.savez(path, x=np.ones(3))
    content = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the headers of each member
        content[content.index(mark) + flags] |= 1
    path.write_bytes(content)
    with pytest.raises(
        SpecError, match=r"data\.args\.file: .*secret\.npz cannot be read as npz: .*encrypted"
    ):
        read_header(path, WHERE)


def test_a_file_of_very_many_tensors_is_refused_early(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number}.npy", b"not an array")
    save_file({str(number): torch.zeros(1) for number in range(10_001)}, tmp_path / "x.safetensors")
    for name, count in (("x.npz", "20,000"), ("x.safetensors", "10,001")):
        with pytest.raises(SpecError, match=f"it holds {count} tensors, and at most 10,000 are read"):
            read_header(tmp_path / name, WHERE)


def test_the_header_of_an_array_is_read_within_little_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x02\x00" + (2**28).to_bytes(4, "little") + b" " * 2**28)
    with pytest.raises(SpecError, match="expected 268435456 bytes got 65524"):
        read_header(tmp_path / "x.npz", WHERE)


# ---- files of strangers


@pytest.mark.parametrize("shape", [[4, 2**53 + 1, 0], [2**63, 0], [4, 2**30, 2**30, 0]])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_shape_that_no_tensor_has_is_refused(shape: list[int], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"y{suffix}"
    if suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("input.npy", array_header(shape))
    else:
        header = json.dumps({"input": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    ((where, what),) = problems(section(tmp_path, file=path.name, target=None, val_fraction=0))
    assert where == "data.args.file"
    assert f"the impossible shape {shape}" in what


def array_header(shape: list[int]) -> bytes:
    header = io.BytesIO()
    plain = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, plain)
    return header.getvalue()


def test_an_archive_of_packed_gigabytes_stays_packed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("hookrun.data.tensors._MOST_PACKED", 2**20)
    with zipfile.ZipFile(tmp_path / "y.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input.npy", array_header([4, 2**20]) + bytes(2**24))
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    ((where, what),) = problems(section(tmp_path, file="y.npz", target=None, val_fraction=0))
    assert where == "data.args.file"
    assert "input.npy would take 16,777,344 bytes, and has " in what


def test_an_array_of_another_size_than_declared_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "y.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input.npy", array_header([4, 2**40]) + bytes(64))
    ((where, what),) = problems(section(tmp_path, file="y.npz", target=None, val_fraction=0))
    assert where == "data.args.file"
    assert "input has the shape of 17,592,186,044,544 bytes" in what


def test_an_array_that_packs_well_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "y.npz", input=np.zeros((4, 2**20), np.float32))
    samples = load(section(tmp_path, file="y.npz", target=None, val_fraction=0), "train", seed=0)
    assert len(samples) == 4
    assert not samples[0][0].any()


def section(root: Path, transforms: dict[str, Any] | None = None, **args: Any) -> Data:
    return Data(name="tensors", root=str(root), args=args, transforms=transforms or {})


def problems(config: Data, split: Split = "train") -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        describe(config, split)
    with pytest.raises(SpecError):
        load(config, split, seed=0)
    return [(problem.where, problem.what) for problem in caught.value.errors]


def wheres(config: Data, split: Split = "train") -> list[str]:
    return [where for where, _ in problems(config, split)]


def first_values(config: Data, split: Split) -> list[int]:
    samples = load(config, split, seed=0)
    return [int(samples[i][0][0]) for i in range(len(samples))]  # type: ignore[index]

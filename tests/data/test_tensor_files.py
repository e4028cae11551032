"""Headers give shapes and dtypes without reading tensors; an unreadable file is an error at its key."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hookrun.data.info import TensorInfo
from hookrun.data.tensor_files import read_header, read_tensors
from hookrun.errors import Problem, SpecError

WHERE = "data.args.file"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
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
def test_a_header_tells_what_the_file_holds(
    suffix: str, tensors: dict[str, tuple[list[int], torch.dtype]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    path = save(tmp_path_factory.mktemp("file") / f"x{suffix}", saved)
    assert read_header(path, WHERE) == {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in saved.items()}
    loaded = read_tensors(path, WHERE, saved)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_bfloat16_is_read_from_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {"a": torch.ones(2, dtype=torch.bfloat16)})
    assert read_header(path, WHERE) == {"a": TensorInfo((2,), torch.bfloat16)}


def test_only_the_named_tensors_are_read(tmp_path: Path) -> None:
    for suffix in (".npz", ".safetensors"):
        path = save(tmp_path / f"x{suffix}", {"a": torch.zeros(1), "b": torch.ones(1)})
        assert read_tensors(path, WHERE, ["b"]) == {"b": torch.ones(1)}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_arrays_of_any_byte_order_and_layout_are_read(tmp_path: Path, order: str, layout: str) -> None:
    array = np.asarray([[1, 2, 3], [4, 5, 6]], dtype=f"{order}f4", order=layout)  # type: ignore[call-overload]
    np.savez_compressed(tmp_path / "x.npz", a=array)
    assert read_header(tmp_path / "x.npz", WHERE) == {"a": TensorInfo((2, 3), torch.float32)}
    assert read_tensors(tmp_path / "x.npz", WHERE, "a")["a"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_arrays_of_other_dtypes_are_recognised_and_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(
        path,
        objects=np.asarray([{}, []], dtype=object),
        words=np.asarray(["a"]),
        fields=np.zeros(1, dtype=[("a", "f4")]),
        complex=np.zeros(1, dtype=np.complex64),
        good=np.zeros(1),
    )
    header = read_header(path, WHERE)
    assert [name for name, info in header.items() if info] == ["good"]
    with pytest.raises(SpecError, match="allow_pickle=False"):
        read_tensors(path, WHERE, ["objects"])


def test_a_missing_file_is_named_with_its_whole_path(tmp_path: Path) -> None:
    assert "there is no file" in damage(tmp_path / "x.npz").what


@pytest.mark.parametrize("name", ["x.pt", "x.npy", "x"])
def test_other_kinds_of_files_are_refused_before_they_are_opened(tmp_path: Path, name: str) -> None:
    assert damage(tmp_path / name).hint == "give a file that ends in .safetensors or .npz"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("part", ["empty", "nonsense", "half"])
def test_a_broken_file_is_an_error_at_its_key(tmp_path: Path, suffix: str, part: str) -> None:
    path = save(tmp_path / f"x{suffix}", {"a": torch.rand(100)})
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "nonsense": b"nonsense" * 20, "half": whole[: len(whole) // 2]}[part])
    assert f"cannot be read as {suffix[1:]}" in damage(path).what


def test_data_damaged_behind_a_good_header_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", {"a": torch.rand(100_000)})
    damaged = bytearray(path.read_bytes())
    damaged[200_000] ^= 0xFF
    path.write_bytes(damaged)
    assert read_header(path, WHERE) == {"a": TensorInfo((100_000,), torch.float32)}
    assert "Bad CRC-32" in damage(path).what


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_both_versions_of_numpys_format_are_read(tmp_path: Path, version: tuple[int, int]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ones(2), version=version)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", buffer.getvalue())
    assert read_header(tmp_path / "x.npz", WHERE) == {"a": TensorInfo((2,), torch.float64)}


def test_an_unknown_version_of_it_is_refused(tmp_path: Path) -> None:
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

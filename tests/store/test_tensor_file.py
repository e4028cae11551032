"""The streaming writer writes a plain safetensors file, and its hash and size are those of the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from hookrun.store.captures.tensor_file import (
    DTYPES,
    Chunks,
    as_bytes,
    open_tensors,
    read_tensors,
    unstorable,
    write_tensors,
)
from hookrun.store.files import StoreError

dtypes = st.sampled_from(sorted(DTYPES, key=str))
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=5))
def test_the_library_reads_every_dtype(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    tensors = {str(number): some(*kind) for number, kind in enumerate(kinds)}
    found = written(tensors)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert same(found[name], value)


def test_tensors_with_other_strides_are_written_equal() -> None:
    base = torch.randn(4, 3, dtype=torch.complex64)
    views = {"t": base.t(), "step": base[::2], "expand": base[:1].expand(5, 3), "conj": base.conj()}
    views |= {"negative": base.conj().imag, "leaf": torch.nn.Parameter(base.real.clone())}
    found = written(views)
    for name, value in views.items():
        assert torch.equal(found[name], value)


def test_every_tensor_is_aligned_to_its_items() -> None:
    file = BytesIO()
    write_tensors(file, {"b": some(torch.bool, (3,)), "h": some(torch.float16, (3,)), "d": torch.zeros(1)})
    data = file.getvalue()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert {name: entry["data_offsets"] for name, entry in header.items()} == {
        "d": [0, 4],
        "h": [4, 10],
        "b": [10, 13],
    }


@pytest.mark.parametrize("rows", [3, 2**17])
def test_without_a_digest_the_same_is_written(rows: int, tmp_path: Path) -> None:
    tensors = {"0": torch.arange(2 * rows, dtype=torch.float32)}
    for name, digest in (("hashed", hashlib.sha256()), ("unhashed", None)):
        with (tmp_path / name).open("wb") as file:
            write_tensors(file, tensors, digest=digest)
    assert (tmp_path / "hashed").read_bytes() == (tmp_path / "unhashed").read_bytes()


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(2).to_sparse(), "sparse or nested"),
        (torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged), "sparse or nested"),
        (torch.empty(2, device="meta"), "a meta tensor has no values"),
        (torch.zeros(2, dtype=torch.complex128), "safetensors has no complex128"),
        (torch.zeros(2), ""),
    ],
)  # fmt: skip
def test_tensors_without_a_disk_format_are_refused(tensor: Tensor, said: str) -> None:
    assert said in unstorable(tensor)
    assert bool(said) == bool(unstorable(tensor))


@given(dtypes, st.integers(0, 3), shapes)
def test_the_bytes_of_rows_are_a_view(dtype: torch.dtype, rows: int, shape: tuple[int, ...]) -> None:
    value = some(dtype, (rows, *shape))
    data = as_bytes(value)
    assert data.shape == (rows, torch.Size(shape).numel() * dtype.itemsize)
    data.zero_()
    assert same(value, torch.zeros(data.numel(), dtype=torch.uint8).view(dtype).reshape(rows, *shape))


def test_the_bytes_of_a_part_with_one_element_are_its_own() -> None:
    rows = torch.arange(10.0).reshape(1, 10)
    for part in (rows[:, 4], rows[:, 4:5], rows.T[4:5], rows[:, 3::7][:, :1]):
        assert torch.equal(as_bytes(part).view(torch.float32).flatten(), part.flatten())
    file = BytesIO()
    write_tensors(file, {"x": rows[:, 4]})
    assert file.getvalue().endswith(rows[0, 4:5].numpy().tobytes())


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(StoreError, match=f"cannot read {path}"):
        open_tensors(path)
    with path.open("wb") as file:
        write_tensors(file, {"0": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=f"{path} is not a whole safetensors file"):
        open_tensors(path)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**64 - 1, 0]])
def test_a_shape_that_torch_does_not_have_is_an_error(shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StoreError, match=f"{path}: the tensor 'x' cannot be read: TypeError"):
        read_tensors(path)


def some(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Random bytes 0 and 1, which are valid in every dtype."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal in dtype, shape and bytes: not every dtype can be compared, and NaN is not equal to itself."""
    kinds = [(value.dtype, value.shape) for value in (left, right)]
    data = [value.contiguous().reshape(-1).view(torch.uint8) for value in (left, right)]
    return kinds[0] == kinds[1] and torch.equal(*data)


def written(tensors: Mapping[str, Tensor | Chunks]) -> dict[str, Tensor]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        with path.open("wb") as file:
            digest = hashlib.sha256()
            size = write_tensors(file, tensors, digest=digest)
        assert hashlib.sha256(path.read_bytes()).digest() == digest.digest()
        assert path.stat().st_size == size
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118

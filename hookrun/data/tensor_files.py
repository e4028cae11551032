"""Tensors in .safetensors and .npz files: shapes and dtypes from the headers alone, then the tensors."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookrun.data.info import TensorInfo
from hookrun.errors import Problem, SpecError

SUFFIXES = (".safetensors", ".npz")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NUMPY_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}

Header = dict[str, TensorInfo | None]


def read_header(path: Path, where: str) -> Header:
    """Every tensor in the file, with its full shape; None for one of a type that is not supported.

    Raises SpecError, at the key `where`, for a missing, unknown or broken file.
    """
    if path.suffix not in SUFFIXES:
        hint = f"give a file that ends in {' or '.join(SUFFIXES)}"
        raise SpecError([Problem(where, f"{path} is neither a safetensors nor an npz file", hint)])
    if not path.is_file():
        hint = "correct the path; a relative one starts at data.root, or where none is set at the working directory"
        raise SpecError([Problem(where, f"there is no file {path}", hint)])
    with _report_damage(path, where):
        return _npz_header(path) if path.suffix == ".npz" else _safetensors_header(path)


def read_tensors(path: Path, where: str, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors; those of a safetensors file stay on disk until their rows are used.

    Raises SpecError, at the key `where`, for a broken file.
    """
    with _report_damage(path, where):
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: _from_numpy(arrays[name]) for name in names}
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}


_DAMAGE = (
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    OSError,
    RuntimeError,  # an encrypted archive
    NotImplementedError,  # a compression that zipfile does not have
    MemoryError,  # a header with sizes larger than the file
)


@contextmanager
def _report_damage(path: Path, where: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        what = f"{path} cannot be read as {path.suffix[1:]}: {error}"
        raise SpecError([Problem(where, what, "write the file again")]) from error


def _safetensors_header(path: Path) -> Header:
    header: Header = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (an open safetensors file is not a mapping)
            view = file.get_slice(name)
            dtype = _DTYPES.get(view.get_dtype())
            header[name] = TensorInfo(tuple(view.get_shape()), dtype) if dtype else None
    return header


def _npz_header(path: Path) -> Header:
    header: Header = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                shape, dtype = _npy_header(file)
            known = _NUMPY_DTYPES.get(dtype.name)
            header[member.removesuffix(".npy")] = TensorInfo(shape, known) if known else None
    return header


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    # Version 3.0 differs from 2.0 only in field names, and an array with fields cannot become a tensor.
    reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in reads:
        raise ValueError(f"the array format {version} is not supported")
    shape, _, dtype = reads[version](file)
    return shape, dtype


def _from_numpy(array: np.ndarray) -> Tensor:
    # Native byte order, C order and writable: torch refuses other byte orders and warns of read-only arrays.
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))

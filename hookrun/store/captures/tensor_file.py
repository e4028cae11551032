"""Safetensors files: written as a stream and hashed at the same time, opened for reading.

The library's own writer needs each tensor in one piece and copies it once more. Here the chunks of a tensor are written
one after the other from the buffer that they lie in. The format is the published one: length of the header, header
(JSON), bytes.
"""

from __future__ import annotations

import json
import math
import operator
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookrun.errors import reason, shortened
from hookrun.store.files import StoreError, open_inside
from hookrun.store.format import STORED_DTYPES, decode

if TYPE_CHECKING:
    from hashlib import _Hash

DTYPES: Mapping[torch.dtype, str] = {getattr(torch, name): code for name, code in STORED_DTYPES.items()}
"""dtype -> its name in a safetensors file, for the dtypes that a file can hold."""


def unstorable(tensor: Tensor) -> str:
    """Why a file cannot hold the tensor, or ``""``."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "a sparse or nested tensor has no plain form on disk"
    if type(tensor).__name__ == "DTensor":
        return "it is divided over several ranks: `full_tensor()` puts it together"
    if tensor.is_meta:
        return "a meta tensor has no values"
    if tensor.dtype not in DTYPES:
        return f"safetensors has no {dtype_name(tensor.dtype)}"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> Tensor:
    """The rows of a contiguous [n, ...] tensor as [n, bytes of a row] uint8, without a copy.

    torch cannot index tensors of some storable dtypes, but it can index their bytes.
    """
    width = tensor.shape[1:].numel()
    # Of a dimension of size 1 the stride may be any number.
    return tensor.as_strided((len(tensor), width), (max(width, 1), 1)).view(torch.uint8)


_SMALL, _LARGE = 1 << 18, 1 << 20
_MOST_UNHASHED = 1 << 26
_MOST_HEADER = 100_000_000
"""Bytes; the limit of the library."""


class Crc32:
    """A checksum with the methods of hashlib's: it finds damage by a disk, in half the time of a SHA-256."""

    _value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in eight characters."""
        return f"{self._value:08x}"


class Chunks(NamedTuple):
    """A tensor in chunks of rows, laid end to end along the first dimension; they need not all fit into memory."""

    dtype: torch.dtype
    shape: Sequence[int]
    chunks: Iterable[Tensor]


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor | Chunks],
    metadata: Mapping[str, str] | None = None,
    digest: _Hash | Crc32 | None = None,
) -> int:
    """Write a safetensors file and return its size in bytes.

    digest: gets all bytes of the file; None where nobody needs one: hashing takes longer than writing

    Tensors and chunks on other devices or not contiguous are copied one at a time.
    """
    # After a header of a multiple of 8 bytes come the largest items first, so that each tensor is aligned to its item
    # size.
    pieces = {
        name: tensor if isinstance(tensor, Chunks) else Chunks(tensor.dtype, tensor.shape, [tensor])
        for name, tensor in tensors.items()
    }
    ordered = sorted(pieces.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, _) in ordered:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode("ascii")
    head += b" " * (-len(head) % 8)

    size = unhashed = 0
    chunks = chain.from_iterable(piece.chunks for _, piece in ordered)
    blocks = _blocks(len(head).to_bytes(8, "little") + head, chunks)
    # Hashing takes twice as long as writing; both release the GIL. The thread starts with the first `submit`.
    with ThreadPoolExecutor(1) as hashing:
        for data in blocks:
            if digest is not None and end < _LARGE:  # too small for a thread to pay off
                digest.update(data)
            elif digest is not None:
                hashed = hashing.submit(digest.update, data)
                unhashed += data.nbytes
                if unhashed > _MOST_UNHASHED:  # blocks that wait to be hashed stay in memory
                    hashed.result()
                    unhashed = 0
            file.write(data)
            size += data.nbytes
            if data.nbytes >= _LARGE:
                start_flushing(file)
    return size


def start_flushing(file: BinaryIO) -> None:
    """Let the system begin to flush a file that is not read again soon, while its next block is written."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_reading(file: BinaryIO, place: int, size: int) -> None:
    """Let the system begin to read a part of a file, while other parts are read."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), place, size, os.POSIX_FADV_WILLNEED)


def _blocks(head: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of the file; small pieces are joined, because each block costs time."""
    small = bytearray(head)
    for tensor in tensors:
        plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        data: memoryview = as_bytes(plain.reshape(1, -1))[0].numpy().data
        if small and (data.nbytes >= _SMALL or len(small) >= _LARGE):
            yield memoryview(bytes(small))
            small.clear()
        if data.nbytes >= _SMALL:
            yield data
        else:
            small += data
    if small:
        yield memoryview(bytes(small))


def open_tensors(path: Path, root: Path | None = None) -> Any:
    """The file as safetensors' lazy, memory-mapped reader.

    root: the run directory of the file, below which links are not followed; the file's own folder unless given

    StoreError if it is missing, not a regular file, or broken: the library checks that the header and every offset
    in it lie within the file.
    """
    try:
        with open_inside(path, root):
            return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise StoreError(f"{path} is not a whole safetensors file: {error}") from error


def read_tensor(file: Any, name: str) -> Tensor:
    """One tensor of an open file, on the CPU even if torch's default device is another; read when it is used.

    StoreError for a shape that torch does not have.
    """
    try:
        with torch.device("cpu"):
            return file.get_tensor(name)
    except (TypeError, RuntimeError) as error:
        raise StoreError(f"the tensor {shortened(name)!r} cannot be read: {reason(error)}") from error


def tensor_start(file: BinaryIO, path: Path, name: str, shape: Sequence[int], dtype: str) -> int:
    """Where the bytes of a tensor begin in an open file.

    dtype: its name in the file

    StoreError unless the header of the file has a tensor of this name, shape and dtype.
    """
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"a header of {length:,} bytes")
        tensor = decode(file.read(length))[name]
        found = f"{tensor['dtype']} {tensor['shape']}"
        start = 8 + length + operator.index(tensor["data_offsets"][0])
        if not 8 + length <= start <= os.fstat(file.fileno()).st_size:
            raise ValueError("it does not begin in the file")
    except (ValueError, TypeError, LookupError) as error:
        raise StoreError(f"{path} lacks the tensor {shortened(name)!r} that its index names") from error
    wanted = f"{dtype} {list(shape)}"
    if found != wanted:
        raise StoreError(
            f"{path}: the tensor {shortened(name)!r} is {shortened(found)} where its index says {wanted}"
        )
    return start


def read_tensors(path: Path, root: Path | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a file by its name, and the file's metadata; raises as `open_tensors` does."""
    with open_tensors(path, root) as file:
        try:
            tensors = {name: read_tensor(file, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except StoreError as error:
            raise StoreError(f"{path}: {error}") from error
        return tensors, dict(file.metadata() or {})

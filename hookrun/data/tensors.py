"""A user's tensors from .safetensors or .npz files, one row for each sample."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples
from hookrun.data.source import Source, checked_file, part_of, val_count
from hookrun.errors import Mistakes, Problem, nearest, refuse, refused_at, shortened, spec_error


@dataclass(frozen=True, slots=True)
class _File:
    """What a file's header says: its path, its number of rows, and shape and dtype of one row of each used tensor."""

    path: Path
    count: int
    row: Mapping[str, TensorInfo]


class Tensors(Source):
    """Which files, and which of their tensors; row i of the input and the target tensors is one sample.

    file:         one file for both splits, of which a fixed fraction of the rows is for validation
    val_fraction: that fraction; 1 gives every row to `val` in the file's order, 0 to `train`
    train_file, val_file: a file for each split instead; one is enough if only its split is used
    input:        the name of the input tensor, or a list of names that become the model's keyword arguments
    target:       the name of the target tensor; null: none. Integer targets become int64
    num_classes:  the number of classes, if the target is a label, which is an integer
    scale:        what uint8 inputs are divided by, which gives float32
    dtype:        the dtype that floating-point tensors are converted to; null: not converted
    """

    name = "tensors"
    file: str | None = None
    val_fraction: float = Field(default=0.2, ge=0, le=1)
    train_file: str | None = None
    val_file: str | None = None
    input: str | list[str] = "input"
    target: str | None = "target"
    num_classes: int | None = Field(default=None, ge=1)
    scale: float | None = Field(default=None, gt=0)
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = "float32"

    @model_validator(mode="after")
    def _one_way_to_name_files(self) -> Tensors:
        if (self.file is None) == (self.train_file is None and self.val_file is None):
            raise ValueError("give either `file`, or `train_file` and `val_file`")
        if not self.input or len(set(self.inputs)) < len(self.inputs):
            raise ValueError("`input` must be a name, or a list of different names")
        return self

    @property
    def inputs(self) -> list[str]:
        """The names of the input tensors."""
        return [self.input] if isinstance(self.input, str) else self.input

    def converted(self, dtype: torch.dtype, *, target: bool = False) -> torch.dtype:
        """The dtype that a sample's tensor has in the end."""
        if dtype is torch.uint8 and not target:
            return torch.float32  # divided by the scale
        if dtype.is_floating_point:
            return getattr(torch, self.dtype) if self.dtype else dtype
        return torch.int64 if target and dtype != torch.bool else dtype

    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        files = self._files(root)
        sizes: dict[Split, int]
        if self.file:
            file = files["file"]
            held_out = val_count(file.count, self.val_fraction)
            sizes = {"train": file.count - held_out, "val": held_out}
            if sizes[split] == 0:
                raise spec_error(
                    "data.args.val_fraction",
                    f"{file.path} has {file.count} rows, and none is for the split '{split}' "
                    f"(val_fraction {self.val_fraction})",
                    "change data.args.val_fraction, or give another file",
                )
        else:
            sizes = {}
            for each in SPLITS:
                of_split = files.get(f"{each}_file")
                sizes[each] = of_split.count if of_split is not None else 0
            key = f"{split}_file"
            where = f"data.args.{key}"
            if key not in files:
                raise spec_error(where, f"the split '{split}' has no file", f"set {where}")
            if sizes[split] == 0:
                raise spec_error(where, f"{files[key].path} has no rows", "give a file that has some")
        row = next(iter(files.values())).row
        refuse(self._misfits(row))
        inputs = {name: TensorInfo(row[name].shape, self.converted(row[name].dtype)) for name in self.inputs}
        target = None
        if self.target:
            info = row[self.target]
            target = TensorInfo(info.shape, self.converted(info.dtype, target=True))
        return DataInfo(
            name=self.name,
            inputs=inputs[self.input] if isinstance(self.input, str) else inputs,
            target=target,
            num_classes=self.num_classes,
            sizes=sizes,
        )

    def _misfits(self, row: Mapping[str, TensorInfo]) -> Iterator[Problem]:
        """A problem for uint8 inputs without a scale, a scale without such, and labels that are not integers."""
        of_bytes = [name for name in self.inputs if row[name].dtype is torch.uint8]
        if of_bytes and self.scale is None:
            yield Problem(
                "data.args.scale",
                f"is not given, and models cannot compute with uint8 inputs: {', '.join(of_bytes)}",
                "set data.args.scale=255 for float32 in 0..1, or 1 for the numbers as they are",
            )
        if self.scale is not None and not of_bytes:
            dtypes = ", ".join(f"{name} {row[name].dtype}" for name in self.inputs)
            yield Problem("data.args.scale", f"divides uint8 inputs, and found {dtypes}", "leave it out")
        if self.num_classes and self.target and row[self.target].dtype.is_floating_point:
            yield Problem(
                "data.args.target",
                f"'{self.target}' is {row[self.target].dtype}, and data.args.num_classes={self.num_classes} says that "
                "it is a label",
                "write labels as integers; for targets that are numbers leave it out, and set model.args.num_classes",
            )

    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        self.inspect(root, split)
        key = "file" if self.file else f"{split}_file"
        file = self._files(root)[key]
        tensors = read_tensors(file.path, f"data.args.{key}", file.row)
        rows = part_of(file.count, self.val_fraction, split) if self.file else range(file.count)
        place = partial(_place, file.path.name, rows)
        return Samples(len(rows), partial(self._sample, tensors, rows), place)

    def _sample(self, tensors: Mapping[str, Tensor], rows: Sequence[int], number: int) -> Sample:
        """A row, converted when it is read: the file may be larger than memory."""
        row = {name: tensor[rows[number]] for name, tensor in tensors.items()}
        inputs = {name: self._input(row[name]) for name in self.inputs}
        target = torch.empty(0)
        if self.target:
            target = row[self.target].to(self.converted(row[self.target].dtype, target=True))
        return inputs[self.input] if isinstance(self.input, str) else inputs, target

    def _input(self, value: Tensor) -> Tensor:
        if value.dtype is torch.uint8:
            return value.to(torch.float32).div_(self.scale or 1)
        return value.to(self.converted(value.dtype))

    def _files(self, root: Path | None) -> dict[str, _File]:
        """Every file given, by the argument that names it. Raises SpecError with every mistake in them."""
        files: dict[str, _File] = {}
        mistakes = Mistakes()
        for key in ("file", "train_file", "val_file"):
            name = getattr(self, key)
            if name is not None:
                file = mistakes.tried(_inspect_file, name, root, f"data.args.{key}", self)
                if file is not None:
                    files[key] = file
        mistakes.refuse()
        if len({tuple(file.row.items()) for file in files.values()}) > 1:
            rows = ", but ".join(f"{_shown(file.row)} in {file.path}" for file in files.values())
            raise spec_error(
                "data.args.val_file",
                f"the two files have rows of different shapes or dtypes: {rows}",
                "write both files with the same tensors",
            )
        return files


def _place(name: str, rows: Sequence[int], number: int) -> str:
    """The file's name and the number of the row in it: ``features.safetensors[17]``."""
    return f"{name}[{rows[number]}]"


def _inspect_file(name: str, root: Path | None, where: str, args: Tensors) -> _File:
    """The header of one file. Raises SpecError for tensors that are missing, unusable or of different lengths."""
    path, _ = checked_file(name, root, where, SUFFIXES, _MOST_FILE)
    wanted = {name: "data.args.input" for name in args.inputs}
    if args.target:
        wanted[args.target] = "data.args.target"
    header = read_header(path, where, wanted)
    problems: list[Problem] = []
    tensors: dict[str, TensorInfo] = {}
    for name, key in wanted.items():
        info = header.get(name)
        if name not in header:
            hint = f"set {key}"
            if key == "data.args.target":
                hint += ", to null if there is none"
            problems.append(Problem(key, f"{path} has no tensor '{name}'; {nearest(name, header)}", hint))
        elif info is None:
            what = f"the tensor '{name}' in {path} is of a type that is not supported"
            problems.append(Problem(key, what, "write it as a float, integer or bool tensor"))
        elif not info.shape:
            what = f"the tensor '{name}' in {path} is a single number"
            problems.append(Problem(key, what, "give it a first dimension, one row for each sample"))
        else:
            tensors[name] = info
    if len({info.shape[0] for info in tensors.values()}) > 1:
        what = f"the tensors in {path} differ in their number of rows: {_shown(tensors)}"
        problems.append(Problem(where, what, "write one row of each for each sample"))
    refuse(problems)
    row = {name: TensorInfo(info.shape[1:], info.dtype) for name, info in tensors.items()}
    return _File(path, next(iter(tensors.values())).shape[0], row)


def _shown(tensors: Mapping[str, TensorInfo]) -> str:
    return ", ".join(f"{name} {info}" for name, info in tensors.items())


SUFFIXES = (".safetensors", ".npz")
_MOST_FILE = 2**60
"""Bytes: tensors may be larger than memory."""

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

_MOST_TENSORS = 10_000
_MOST_HEADER = 2**16
"""Bytes of an array's header in an npz file; NumPy would read as many as the file says."""
_MOST_ELEMENTS = 2**53
_MOST_PACKED = 2**30
_MOST_TIMES = 64
"""An array of more than `_MOST_PACKED` bytes may have this many times as many as it takes in an npz file."""


def read_header(path: Path, where: str, wanted: Collection[str] | None = None) -> Header:
    """Every tensor in the file with its full shape, or those in `wanted`; None for one of an unsupported type.

    Raises SpecError, at the key `where`, for a broken file.
    """
    with _report_damage(path, where):
        return _npz_header(path, wanted) if path.suffix == ".npz" else _safetensors_header(path, wanted)


def read_tensors(path: Path, where: str, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors; those of a safetensors file stay on disk until their rows are used.

    Raises SpecError, at the key `where`, for a broken file.
    """
    with _report_damage(path, where):
        if path.suffix == ".npz":
            tensors = {}
            with np.load(path, allow_pickle=False) as arrays:
                for name in names:
                    array = arrays[name]
                    # Torch refuses other byte orders than the native one, and warns of read-only arrays.
                    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
                    tensors[name] = torch.from_numpy(native)
            return tensors
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


def _report_damage(path: Path, where: str) -> AbstractContextManager[None]:
    what = f"{path} cannot be read as {path.suffix[1:]}: "
    return refused_at(where, "write the file again", kinds=_DAMAGE, what=what)


def _unread(names: Collection[str]) -> Header:
    if len(names) > _MOST_TENSORS:
        raise ValueError(f"it holds {len(names):,} tensors, and at most {_MOST_TENSORS:,} are read")
    return dict.fromkeys(names)


def _safetensors_header(path: Path, wanted: Collection[str] | None) -> Header:
    with safe_open(path, framework="pt") as file:
        header = _unread(file.keys())
        for name in header:
            if wanted is None or name in wanted:
                view = file.get_slice(name)
                header[name] = _info(view.get_shape(), _DTYPES.get(view.get_dtype()))
    return header


def _info(shape: Sequence[int], dtype: torch.dtype | None) -> TensorInfo | None:
    """None without a dtype. Raises ValueError for a shape that no tensor has, even an empty one."""
    if min(shape, default=0) < 0 or math.prod(size for size in shape if size) > _MOST_ELEMENTS:
        raise ValueError(f"it holds a tensor of the impossible shape {shortened(str(list(shape)))}")
    return TensorInfo(tuple(shape), dtype) if dtype else None


def _npz_header(path: Path, wanted: Collection[str] | None) -> Header:
    # Version 3.0 differs from 2.0 only in field names, and an array with fields cannot become a tensor.
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with zipfile.ZipFile(path) as archive:
        members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
        header = _unread(members)
        for name, member in members.items():
            if wanted is None or name in wanted:
                _require_bounded(member)
                with archive.open(member) as packed:
                    file = BytesIO(packed.read(_MOST_HEADER))
                version = np.lib.format.read_magic(file)
                if version not in readers:
                    raise ValueError(f"the array format {version} is not supported")
                shape, _, dtype = readers[version](file)
                header[name] = _info(shape, _NUMPY_DTYPES.get(dtype.name))
                size = file.tell() + math.prod(shape) * dtype.itemsize
                if size != member.file_size and not dtype.hasobject:
                    raise ValueError(
                        f"{name} has the shape of {size:,} bytes, and the file says {member.file_size:,}"
                    )
    return header


def _require_bounded(member: zipfile.ZipInfo) -> None:
    """Raises ValueError for an array that takes much more memory than its packed bytes, before it is unpacked."""
    packed = member.compress_size
    if member.file_size > _MOST_PACKED and member.file_size > _MOST_TIMES * packed:
        raise ValueError(
            f"{member.filename} would take {member.file_size:,} bytes, and has {packed:,} in the file"
        )

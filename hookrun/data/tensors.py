"""A user's tensors from .safetensors or .npz files, one row for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hookrun.arguments import Args
from hookrun.data.info import SPLITS, DataInfo, Split, TensorInfo
from hookrun.data.samples import Sample, Samples
from hookrun.data.source import Source
from hookrun.data.split import split_indices, val_count
from hookrun.data.tensor_files import read_header, read_tensors
from hookrun.errors import Problem, SpecError, nearest


class TensorsArgs(Args):
    """Which files, and which of their tensors.

    file:         one file for both splits, of which a fixed fraction of the rows is for validation
    val_fraction: that fraction; 1 gives every row to `val` in the file's order, 0 to `train`
    train_file, val_file: a file for each split instead; one is enough if only its split is used
    input:        the name of the input tensor, or a list of names that become the model's keyword arguments
    target:       the name of the target tensor; null: none. Integer targets become int64
    num_classes:  the number of classes, if the target is a label
    dtype:        the dtype that floating-point tensors are converted to; null: not converted
    """

    file: str | None = None
    val_fraction: float = Field(default=0.2, ge=0, le=1)
    train_file: str | None = None
    val_file: str | None = None
    input: str | list[str] = "input"
    target: str | None = "target"
    num_classes: int | None = Field(default=None, ge=1)
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = "float32"

    @model_validator(mode="after")
    def _one_way_to_name_files(self) -> TensorsArgs:
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
        if dtype.is_floating_point:
            return getattr(torch, self.dtype) if self.dtype else dtype
        return torch.int64 if target and dtype != torch.bool else dtype


@dataclass(frozen=True, slots=True)
class _File:
    """What a file's header says: its path, its number of rows, and shape and dtype of one row of each used tensor."""

    path: Path
    count: int
    row: Mapping[str, TensorInfo]


class Tensors(Source[TensorsArgs]):
    """Row i of the input and the target tensors is one sample."""

    args = TensorsArgs

    def inspect(self, root: Path | None, args: TensorsArgs, split: Split) -> DataInfo:
        files = _inspect_files(root, args)
        sizes: dict[Split, int | None] = {s: _count(files, args, s) for s in SPLITS}
        if sizes[split] == 0:
            raise SpecError([_no_rows(files, args, split)])
        row = next(iter(files.values())).row
        inputs = {name: TensorInfo(row[name].shape, args.converted(row[name].dtype)) for name in args.inputs}
        target = row[args.target] if args.target else None
        return DataInfo(
            name=self.name,
            inputs=inputs[args.input] if isinstance(args.input, str) else inputs,
            target=TensorInfo(target.shape, args.converted(target.dtype, target=True)) if target else None,
            num_classes=args.num_classes,
            sizes=sizes,
        )

    def open(self, root: Path | None, args: TensorsArgs, split: Split, seed: int) -> Samples:
        self.inspect(root, args, split)
        key = _key(args, split)
        file = _inspect_files(root, args)[key]
        used = {*args.inputs, *([args.target] if args.target else [])}
        tensors = read_tensors(file.path, f"data.args.{key}", used)
        if args.file is None:
            return _FileSamples(tensors, args, file.path.name, range(file.count))
        train, val = split_indices(file.count, args.val_fraction)
        return _FileSamples(tensors, args, file.path.name, train if split == "train" else val)


class _FileSamples(Samples):
    """Rows of the tensors of one file, converted when they are read: the file may be larger than memory."""

    def __init__(
        self, tensors: Mapping[str, Tensor], args: TensorsArgs, name: str, rows: Sequence[int]
    ) -> None:
        self._tensors = tensors
        self._name = name
        self._args = args
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        args = self._args
        inputs = {name: self._converted(name, row) for name in args.inputs}
        target = self._converted(args.target, row, target=True) if args.target else torch.empty(0)
        return inputs[args.input] if isinstance(args.input, str) else inputs, target

    def file(self, index: int) -> str:
        """The file's name and the number of the row in it: ``features.safetensors[17]``."""
        return f"{self._name}[{self._rows[index]}]"

    def _converted(self, name: str, row: int, *, target: bool = False) -> Tensor:
        tensor = self._tensors[name][row]
        return tensor.to(self._args.converted(tensor.dtype, target=target))


def _key(args: TensorsArgs, split: Split) -> str:
    """The argument that names the file of a split."""
    return "file" if args.file else f"{split}_file"


def _count(files: Mapping[str, _File], args: TensorsArgs, split: Split) -> int:
    """How many rows a split has; 0 where it has no file."""
    file = files.get(_key(args, split))
    if file is None or args.file is None:
        return file.count if file else 0
    held_out = val_count(file.count, args.val_fraction)
    return held_out if split == "val" else file.count - held_out


def _no_rows(files: Mapping[str, _File], args: TensorsArgs, split: Split) -> Problem:
    where = f"data.args.{_key(args, split)}"
    if _key(args, split) not in files:
        return Problem(where, f"the split '{split}' has no file", f"set {where}")
    file = files[_key(args, split)]
    if args.file is None:
        return Problem(where, f"{file.path} has no rows", "give a file that has some")
    what = f"{file.path} has {file.count} rows, and none is for the split '{split}' (val_fraction {args.val_fraction})"
    return Problem("data.args.val_fraction", what, "change data.args.val_fraction, or give another file")


def _inspect_files(root: Path | None, args: TensorsArgs) -> dict[str, _File]:
    """Every file given, by the argument that names it. Raises SpecError with every mistake in them."""
    files: dict[str, _File] = {}
    problems: list[Problem] = []
    for key in ("file", "train_file", "val_file"):
        name = getattr(args, key)
        if name is not None:
            try:
                path = (root or Path.cwd()) / Path(name).expanduser()
                files[key] = _inspect_file(path, f"data.args.{key}", args)
            except SpecError as error:
                problems += error.errors
    if problems:
        raise SpecError(problems)
    if len({tuple(file.row.items()) for file in files.values()}) > 1:
        shown = ", but ".join(f"{_shown(file.row)} in {file.path}" for file in files.values())
        what = f"the two files have rows of different shapes or dtypes: {shown}"
        raise SpecError([Problem("data.args.val_file", what, "write both files with the same tensors")])
    return files


def _inspect_file(path: Path, where: str, args: TensorsArgs) -> _File:
    """The header of one file. Raises SpecError for tensors that are missing, unusable or of different lengths."""
    header = read_header(path, where)
    wanted = {name: "data.args.input" for name in args.inputs}
    if args.target:
        wanted[args.target] = "data.args.target"
    problems: list[Problem] = []
    found: dict[str, TensorInfo] = {}
    for name, key in wanted.items():
        info = header.get(name)
        if name not in header:
            hint = f"set {key}" + (", to null if there is none" if key == "data.args.target" else "")
            problems.append(Problem(key, f"{path} has no tensor '{name}'; {nearest(name, header)}", hint))
        elif info is None:
            what = f"the tensor '{name}' in {path} is of a type that is not supported"
            problems.append(Problem(key, what, "write it as a float, integer or bool tensor"))
        elif not info.shape:
            what = f"the tensor '{name}' in {path} is a single number"
            problems.append(Problem(key, what, "give it a first dimension, one row for each sample"))
        else:
            found[name] = info
    if len({info.shape[0] for info in found.values()}) > 1:
        what = f"the tensors in {path} differ in their number of rows: {_shown(found)}"
        problems.append(Problem(where, what, "write one row of each for each sample"))
    if problems:
        raise SpecError(problems)
    row = {name: TensorInfo(info.shape[1:], info.dtype) for name, info in found.items()}
    return _File(path, next(iter(found.values())).shape[0], row)


def _shown(tensors: Mapping[str, TensorInfo]) -> str:
    return ", ".join(f"{name} {info}" for name, info in tensors.items())


TENSORS = Tensors("tensors")

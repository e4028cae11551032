"""A folder of safetensors files that another program wrote, read as a run that has captures and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from hookrun.data.info import SPLITS
from hookrun.engine.spec.selector import Node, Tree, parse_selector
from hookrun.engine.validation import validated
from hookrun.errors import MOST_COMPARED, counted, listed, nearest, shortened
from hookrun.store.captures.read import PlainFile, SampleTable, captured_tensors, read_captures
from hookrun.store.captures.shard import Entry
from hookrun.store.captures.tensor_file import open_tensors
from hookrun.store.config.row_files import RowFiles
from hookrun.store.files import StoreError, os_errors
from hookrun.store.format import STORED_DTYPES
from hookrun.store.reader import Run
from hookrun.store.records import fitting

MOST_FILES = 2**21
"""How many files are read as one folder."""

_DTYPES = {code: name for name, code in STORED_DTYPES.items()}


def open_folder(
    path: str | os.PathLike[str], rows: RowFiles | Mapping[str, Any], where: str = "rows"
) -> RowFolder:
    """The folder at `path`, read as `rows` says.

    SpecError at the key path `where` for keys that are wrong. StoreError if there is no such folder, file or tensor, or
    the rows do not fit together; the message names the file.
    """
    keys = rows if isinstance(rows, RowFiles) else validated(RowFiles, rows, where)
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}")
    return RowFolder(folder, _files(folder, keys), keys)


class RowFolder(Run):
    """A folder with rows of another program. It has no configuration, data or metrics."""

    def __init__(self, path: Path, files: Sequence[PlainFile], keys: RowFiles) -> None:
        super().__init__(path)
        self.files = files
        self.keys = keys
        samples = _SamplesOfFiles(path, files)
        # Files of the folder that are called like those of a run are not read.
        vars(self).update({name: {} for name in ("config", "plan", "env", "model", "hooks")})
        vars(self).update({name: [] for name in ("metrics", "stats", "faults", "lens", "generations")})
        captures = read_captures(path, files, {}, samples)
        vars(self).update(predictions=None, samples=samples, captures=captures)

    @property
    def status(self) -> dict[str, Any]:
        """Empty."""
        return {}

    @property
    def note(self) -> str:
        """What was read, in a line."""
        tensors = list(captured_tensors(self.captures))
        files = f"{counted(len(self.files), 'file')} (each_file: {self.keys.each_file})"
        return f"{self.path}: {files}, read as {listed(map(repr, tensors), 3)}"

    def like(self, run: Run) -> RowFolder:
        """The folder as if its rows were captured by the run: its capture has the name of the run's, and the split.

        StoreError if the run has several captures, none with the name of the folder, or rows of several splits.
        """
        name = self.path.name
        if name not in run.captures:
            if len(run.captures) != 1:
                raise StoreError(
                    f"{self.path} is compared with a capture of its name, and {run.path} captured "
                    f"{listed(run.captures) or 'nothing'}: rename the folder"
                )
            name = next(iter(run.captures))
        splits = set[int]()
        for capture in captured_tensors({name: run.captures[name]}):
            splits.update(capture.split_numbers.unique().tolist())
        if len(splits) != 1:
            raise StoreError(
                f"{run.path} captured several splits, and the files of {self.path} do not say of which their rows are: "
                "compare with a run of one split"
            )
        files = list[PlainFile]()
        for file in self.files:
            entries = [replace(entry, hook=name) for entry in file.entries]
            files.append(replace(file, entries=entries, split=min(splits)))
        return RowFolder(self.path, files, self.keys)


@dataclass(frozen=True)
class _SamplesOfFiles(SampleTable):
    """The file of each sample."""

    files: Sequence[PlainFile]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        lines = list[dict[str, Any]]()
        for file in self.files:
            split = SPLITS[file.split] if file.split >= 0 else ""
            for sample in range(file.sample, file.sample + file.samples):
                lines.append({"split": split, "sample": sample, "file": file.file})
        return lines

    @cached_property
    def texts(self) -> Mapping[int, str]:
        return {}


# ---- what the files hold

Tensors = dict[str, tuple[str, list[int]]]
"""Name of a tensor -> its dtype in the file, and its shape."""


def _files(folder: Path, keys: RowFiles) -> list[PlainFile]:
    """The files with tensors that match, in their order, each with the number of its first sample."""
    with os_errors(f"cannot list {folder}"):
        paths = list(islice(folder.glob(keys.pattern), MOST_FILES + 1))
        present = [path.name for path in islice(folder.iterdir(), MOST_COMPARED)]
    if not paths:
        raise StoreError(f"no file of {folder} matches {keys.pattern!r}: {nearest(keys.pattern, present)}")
    if len(paths) > MOST_FILES:
        raise StoreError(f"{folder} has more than the {MOST_FILES:,} files that are read")
    find = lru_cache(partial(_matching, keys.key))
    joined = _Joined(folder, keys)
    tensors: Tensors = {}
    for path in sorted(paths, key=_natural):
        tensors = _tensors(path, folder)
        chosen = find(tuple(tensors))
        if chosen:
            joined.add(path, {name: tensors[name] for name in chosen})
    if not joined.files:
        key = shortened(keys.key)
        raise StoreError(f"no tensor in the files of {folder} matches {key!r}: {nearest(key, tensors)}")
    return joined.files


def _natural(path: Path) -> tuple[list[str | int], str]:
    """A sort key in which numbers count by size."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if part.isdecimal() else part for part in parts], str(path)


def _matching(key: str, names: tuple[str, ...]) -> list[str]:
    found = parse_selector(key).find(Tree({name: Node(name) for name in names}))
    return [name for name in names if name in found]


def _tensors(path: Path, folder: Path) -> Tensors:
    """The header of a file, in the order of the names. StoreError if it is not a whole file of tensors."""
    tensors: Tensors = {}
    with open_tensors(path, folder) as file:
        for name in sorted(file.keys(), key=lambda name: _natural(Path(name))):
            part = file.get_slice(name)
            tensors[name] = part.get_dtype(), part.get_shape()
    return tensors


@dataclass
class _Joined:
    """Files whose rows follow one another.

    kinds:  name of a tensor -> dtype and shape of its rows, and the first file with it
    beside: name of a tensor -> the names in its first file, and this file
    counts: names of the tensors of a file -> how many samples the files with these have so far
    """

    folder: Path
    keys: RowFiles
    files: list[PlainFile] = field(default_factory=list)
    kinds: dict[str, tuple[str, Path]] = field(default_factory=dict)
    beside: dict[str, tuple[tuple[str, ...], Path]] = field(default_factory=dict)
    counts: dict[tuple[str, ...], int] = field(default_factory=dict)

    def add(self, path: Path, tensors: Tensors) -> None:
        """Add a file with the tensors that were chosen. StoreError if they do not fit to those before."""
        entries = [self._entry(path, name, *tensor) for name, tensor in tensors.items()]
        for entry in entries:
            kind = f"{entry.dtype} {list(entry.shape)}"
            before, first = self.kinds.setdefault(entry.module, (kind, path))
            if kind != before:
                name = shortened(entry.module)
                raise StoreError(f"{path}: a row of {name!r} is {kind}, and in {first} it is {before}")
        names = tuple(tensors)
        sample = len(self.files)
        if self.keys.each_file == "samples":
            self._require_same_rows(path, entries)
            sample = self.counts.get(names, 0)
            self.counts[names] = sample + entries[0].rows
        self.files.append(
            PlainFile(
                path.relative_to(self.folder).as_posix(),
                path.stat().st_size,
                entries,
                sample,
                is_tokens=self.keys.each_file == "tokens",
                is_whole=self.keys.each_file == "sample",
            )
        )

    def _entry(self, path: Path, name: str, code: str, shape: list[int]) -> Entry:
        place = f"{path}: the tensor {shortened(name)!r}"
        if code not in _DTYPES:
            raise StoreError(f"{place} is {code}, which hookrun does not read")
        rows = 1
        if self.keys.each_file != "sample":
            if len(shape) < 2:
                raise StoreError(
                    f"{place} has the shape {shape}, which is not one of rows of numbers: if a file is one sample and "
                    "each of its tensors a row, say each_file: sample; else choose other tensors with `key`"
                )
            rows, *shape = shape
        facts = {"hook": self.folder.name, "module": name, "path": "", "dtype": _DTYPES[code], "shape": shape}
        return fitting(f"{place} cannot be read", {"key": name, **facts, "rows": rows, "by": "sample"}, Entry)

    def _require_same_rows(self, path: Path, entries: Sequence[Entry]) -> None:
        """StoreError if row n of two tensors may not be of one sample."""
        names = tuple(entry.module for entry in entries)
        for entry in entries:
            if entry.rows != entries[0].rows:
                raise StoreError(
                    f"{path}: {shortened(entry.module)!r} has {counted(entry.rows, 'row')} and "
                    f"{shortened(names[0])!r} {entries[0].rows:,}: choose one of them with `key`"
                )
            before, first = self.beside.setdefault(entry.module, (names, path))
            if before != names:
                other = shortened(min(set(before) ^ set(names)))
                raise StoreError(
                    f"only one of {first} and {path} has {other!r}, and both have {shortened(entry.module)!r}: row n "
                    "of the two would not be of one sample; choose one of them with `key`"
                )

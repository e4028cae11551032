"""A folder of safetensors files that another program wrote, read as a run that has captures and nothing else."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hookrun.data.info import SPLITS
from hookrun.engine.spec.selector import Tree, parse_selector
from hookrun.engine.validation import validated
from hookrun.errors import counted, listed, nearest, shortened
from hookrun.store.captures.read import (
    PlainFile,
    SampleTable,
    captured_tensors,
    chosen_tensors,
    read_captures,
)
from hookrun.store.captures.shard import Entry
from hookrun.store.captures.tensor_file import open_tensors
from hookrun.store.config.row_files import RowFiles
from hookrun.store.files import StoreError, near, os_errors
from hookrun.store.format import STORED_DTYPES
from hookrun.store.reader import Run
from hookrun.store.records import fitting

MOST_FILES = 2**21
"""How many files are read as one folder."""

_DTYPES = {code: name for name, code in STORED_DTYPES.items()}


def open_folder(path: str | os.PathLike[str], rows: RowFiles | Mapping[str, Any]) -> RowFolder:
    """The folder at `path`, read as `rows` says.

    SpecError for keys that are wrong. StoreError if there is no such folder, file or tensor, or
    the rows do not fit together; the message names the file.
    """
    keys = rows if isinstance(rows, RowFiles) else validated(RowFiles, rows, "rows")
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}{near(folder, '*/')}")
    return RowFolder(folder, _files(folder, keys), keys)


class RowFolder(Run):
    """A folder with rows of another program. It has no configuration, data or metrics."""

    def __init__(self, path: Path, files: Sequence[PlainFile], keys: RowFiles) -> None:
        super().__init__(path)
        self.files = files
        self.keys = keys
        samples = _SamplesOfFiles(path, files)
        captures = read_captures(path, files, {}, samples)
        # Files of the folder that are called like those of a run are not read.
        vars(self).update(config={}, plan={}, env={}, model={}, hooks={}, metrics=[], stats=[], faults=[])
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
        (name,) = run.captures if len(run.captures) == 1 else (self.path.name,)
        splits = set[int]()
        for capture in chosen_tensors(run.captures, name):
            splits.update(capture.split_numbers.tolist())
        if len(splits) > 1:
            raise StoreError(
                f"{run.path} captured several splits, and the files of {self.path} do not say of which their rows are: "
                "compare with a run of one split"
            )
        files: list[PlainFile] = []
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
        lines: list[dict[str, Any]] = []
        for file in self.files:
            split = SPLITS[file.split] if file.split >= 0 else ""
            count = file.entries[0].rows if file.each_file == "samples" else 1
            for sample in range(file.sample, file.sample + count):
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
        paths = [path for path in islice(folder.glob(keys.pattern), MOST_FILES + 1) if path != folder]
        if not paths:
            present = (path.name for path in folder.iterdir())
            raise StoreError(
                f"no file of {folder} matches {keys.pattern!r}: {nearest(keys.pattern, present)}"
            )
    if len(paths) > MOST_FILES:
        raise StoreError(f"{folder} has more than the {MOST_FILES:,} files that are read")
    files = list(_joined(folder, keys, paths))
    if not files:
        tensors = chain.from_iterable(_tensors(path, folder) for path in paths)
        raise StoreError(
            f"no tensor in the files of {folder} matches {keys.key!r}: {nearest(keys.key, tensors)}"
        )
    return files


def _natural(path: Path) -> tuple[list[str | int], str]:
    """A sort key in which numbers count by size."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if part.isdecimal() else part for part in parts], str(path)


def _tensors(path: Path, folder: Path) -> Tensors:
    """The header of a file. StoreError if it is not a whole file of tensors."""
    with open_tensors(path, folder) as file:
        tensors: Tensors = {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            tensors[name] = (part.get_dtype(), part.get_shape())
        return tensors


def _joined(folder: Path, keys: RowFiles, paths: Iterable[Path]) -> Iterator[PlainFile]:
    """The files with a tensor that was chosen, each with the number of its first sample.

    StoreError if the rows do not fit together.
    """
    selector = parse_selector(keys.key)
    select = lru_cache(lambda names: selector.select(Tree.of_names(names)))
    are_samples = keys.each_file == "samples"
    kinds: dict[str, tuple[tuple[str, tuple[int, ...]], Path]] = {}
    counts = Counter[str]()
    for number, path in enumerate(sorted(paths, key=_natural)):
        tensors = _tensors(path, folder)
        entries = [_entry(path, folder.name, name, *tensors[name], keys) for name in select(tuple(tensors))]
        if not entries:
            continue
        for entry in entries:
            kind = entry.dtype, entry.shape
            before, first = kinds.setdefault(entry.module, (kind, path))
            if kind != before:
                name = shortened(entry.module)
                raise StoreError(f"{path}: the rows of {name!r} are {kind}, and in {first} they are {before}")
        starts = {(counts[entry.module], entry.rows) for entry in entries}
        if are_samples and len(starts) > 1:
            names = listed(shortened(entry.module) for entry in entries)
            raise StoreError(
                f"{path}: {names} do not have the same number of rows in it, or in the files before it: row n of one "
                "would not be of the sample of row n of another one; choose one of them with `key`"
            )
        name = path.relative_to(folder).as_posix()
        sample = counts[entries[0].module] if are_samples else number
        yield PlainFile(name, path.stat().st_size, entries, keys.each_file, sample)
        counts.update({entry.module: entry.rows for entry in entries})


def _entry(path: Path, hook: str, name: str, code: str, shape: list[int], keys: RowFiles) -> Entry:
    place = f"{path}: the tensor {shortened(name)!r}"
    if code not in _DTYPES:
        raise StoreError(f"{place} is {code}, which hookrun does not read")
    rows = 1
    if keys.each_file != "sample":
        if len(shape) < 2 or 0 in shape[1:]:
            raise StoreError(
                f"{place} has the shape {shape}, which is not one of rows of numbers: if a file is one sample and "
                "each of its tensors a row, say each_file: sample; else choose other tensors with `key`"
            )
        rows, *shape = shape
    facts = {"hook": hook, "module": name, "path": "", "dtype": _DTYPES[code], "shape": shape}
    return fitting(f"{place} cannot be read", {"key": name, **facts, "rows": rows, "by": "sample"}, Entry)

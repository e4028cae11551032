"""Reading captures: a lazy tensor per hook, module and place in the value, found by name."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from hookrun.data.info import SPLITS, Split
from hookrun.engine.html import Shown, View
from hookrun.engine.values.tensors import whole_numbers
from hookrun.errors import HookrunError, Lookup, first_lines, listed, nearest
from hookrun.store.captures.shard import Entry, Shard
from hookrun.store.captures.tensor_file import (
    DTYPES,
    as_bytes,
    dtype_name,
    open_tensors,
    read_tensor,
    start_reading,
    tensor_start,
)
from hookrun.store.files import StoreError, open_inside, require_bytes, require_size
from hookrun.store.format import COLUMNS, FIRING, SAMPLES, STORED_DTYPES, TOKENS
from hookrun.store.records import SampleLine, TokenLine, grouped, read_records
from hookrun.store.studies import ask_report
from hookrun.store.tables import as_table

T = TypeVar("T")

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_OPEN_SHARDS = 16
_READ_AT_ONCE = 2**18
"""Bytes. So many neighbouring rows, or more, are read and not mapped, which is slower and holds memory."""
_SHOWN_ROWS = 5
_SHOWN_VALUES = 8
"""How many rows, and how many values of each, a notebook shows."""

ReadRows = Callable[[Sequence[range], Tensor], None]
"""Reads pieces of neighbouring rows, one after the other into a tensor [rows, bytes of a row] uint8."""

MOST_SHARDS = 16
"""How many shards a sample of a capture's rows is drawn from."""

_LEAST = (FIRING, 0, 0, 0, 0, -1, -1, -1, -1, -1)
"""The smallest allowed value of each column of COLUMNS, which is also its value where the column is missing."""


@dataclass(frozen=True)
class PlainFile:
    """A file of tensors that another program wrote: a shard without tables of its rows, which are made.

    each_file: what its rows are, see `RowFiles`
    sample:    the number of its first sample
    split:     of its samples, as in the column; -1: not known
    """

    file: str
    bytes: int
    entries: Sequence[Entry]
    each_file: str
    sample: int
    split: int = -1
    columns: ClassVar[tuple[str, ...]] = ()

    def made_columns(self, rows: int) -> dict[str, Any]:
        """The sample of each row, its split, and if they are tokens its position."""
        numbers = torch.arange(rows, device="cpu")
        if self.each_file == "tokens":
            return {"split": self.split, "sample": self.sample, "position": numbers}
        return {"split": self.split, "sample": self.sample + numbers}


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one capture in one shard: the shard's file, and the entry in its index."""

    shard: Shard | PlainFile
    entry: Entry

    @property
    def stored_shape(self) -> list[int]:
        """The shape of the tensor in the file."""
        if isinstance(self.shard, PlainFile) and self.shard.each_file == "sample":
            return list(self.entry.shape)
        return [self.entry.rows, *self.entry.shape]


_kind_of: Callable[[_Part], tuple[str, tuple[int, ...]]] = attrgetter("entry.dtype", "entry.shape")


@dataclass(frozen=True)
class _Column:
    """An attribute of StoredCapture: a column of `COLUMNS` for its rows."""

    name: str

    def __get__(self, capture: StoredCapture, owner: type[StoredCapture]) -> Tensor:
        return capture._table[0][:, COLUMNS.index(self.name)].clone()


class StoredCapture(Shown):
    """The captured rows of one tensor, read from the shards when they are needed.

    Rows are in dataset order if each sample, or each of its tokens, was captured once, else in the order of
    recording. An int as index gives one row; a slice, list or tensor of ints gives a [rows, ...] tensor. Both are
    copies on the CPU, free to change.

    hook, module, path: where it was captured; `path` is the place of the tensor in a container, or ``""``
    number: its place in the order in which the captures of the run were first recorded
    """

    def __init__(
        self,
        hook: str,
        module: str,
        path: str,
        parts: Sequence[_Part],
        shards: _Shards,
        samples: SampleTable,
        number: int,
    ) -> None:
        self.hook = hook
        self.module = module
        self.path = path
        self.number = number
        self._parts = parts
        self._shards = shards
        self._samples = samples
        rows = [0, *(part.entry.rows for part in parts)]
        # the first row of each part in the order of recording, and the end of the last part
        self._bounds = torch.tensor(rows, dtype=torch.int64, device="cpu").cumsum(0)
        self._count = int(self._bounds[-1])

    @property
    def label(self) -> str:
        """``features at 'layer4', [0]``."""
        label = f"{self.hook} at {self.module!r}"
        if self.path:
            label += f", {self.path}"
        return label

    @property
    def tensor_name(self) -> str:
        """The module, and the place in its value: ``encoder [0]``."""
        return f"{self.module} {self.path}" if self.path else self.module

    def __len__(self) -> int:
        return self._count

    @property
    def is_by_sample(self) -> bool:
        """Whether each row is of one sample, or one of its tokens; else a row is the value of one firing."""
        return all(part.entry.by == "sample" for part in self._parts)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row. HookrunError if the rows differ."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def by_kind(self) -> list[StoredCapture]:
        """The rows of each dtype and shape as a capture."""
        return [self._of(parts) for parts in grouped(self._parts, _kind_of).values()]

    def recorded(self) -> Iterator[tuple[int, ReadRows]]:
        """In the order of recording: how many rows each shard has, and a function that reads some of them."""
        return ((part.entry.rows, partial(self._shards.read, part)) for part in self._parts)

    def by_shard(self) -> Iterator[StoredCapture]:
        """The rows of each shard as a capture, which closes the shard when it is dropped: its memory is free again."""
        return (self._of([part], _Shards(self._shards.folder)) for part in self._parts)

    def sample(self, most: int) -> StoredCapture:
        """At most `most` of the rows, evenly spaced over at most `MOST_SHARDS` shards."""
        some = self.of_shards(min(MOST_SHARDS, most))
        return some.chosen(torch.tensor(spread(range(len(some)), most), dtype=torch.int64))

    def of_shards(self, most: int) -> StoredCapture:
        """The rows of at most `most` shards, evenly spaced with the first and the last."""
        return self._of(spread(self._parts, most))

    def chosen(self, rows: Tensor | slice) -> StoredCapture:
        """The rows with these numbers [n] as a capture, in this order; its shards are those of the whole capture."""
        table, order = self._table
        capture = self._of(self._parts)
        capture._table = table[rows], order[rows]
        capture._count = len(order[rows])
        return capture

    def _of(self, parts: Sequence[_Part], shards: _Shards | None = None) -> StoredCapture:
        return StoredCapture(
            self.hook, self.module, self.path, parts, shards or self._shards, self._samples, self.number
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *shape of a row). HookrunError if the rows differ in shape."""
        return (len(self), *self._common(self._parts)[1])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows. HookrunError if they differ."""
        return self._common(self._parts)[0]

    sample_ids = _Column("sample")
    """[rows] int64: the sample of each row; -1 where a row is a whole call of the hook."""

    epochs = _Column("epoch")
    """[rows] int64: the epoch of each row."""

    steps = _Column("step")
    """[rows] int64: the step of each row."""

    calls = _Column("call")
    """[rows] int64: which call of the module within one forward pass each row was captured in."""

    ranks = _Column("rank")
    """[rows] int64: the rank that recorded each row in a distributed run; else 0."""

    split_numbers = _Column("split")
    """[rows] int64: the split of each row's sample: 0 train, 1 val, -1 neither."""

    positions = _Column("position")
    """[rows] int64: the position of each row's token, counted from the sample's first real token.

    In attention patterns the position of the query. -1 if a row is not of one token.
    """

    keys = _Column("key")
    """[rows] int64: the position of the key if the hook's `tokens` names queries and keys; else -1."""

    token_ids = _Column("token")
    """[rows] int64: the id of each row's token; -1 if it is not known, or a row is not of one token."""

    @property
    def splits(self) -> list[str]:
        """The split of each row's sample: `train`, `val`, or ``""`` for neither."""
        return [SPLITS[part] if part >= 0 else "" for part in self.split_numbers.tolist()]

    @property
    def text(self) -> list[str]:
        """The text of each row's token; ``""`` if the run did not write it."""
        return [self._samples.texts.get(token, "") for token in self.token_ids.tolist()]

    @property
    def files(self) -> list[str]:
        """The file of each row's sample, below the data's root; ``""`` if the run did not write it."""
        return self._sample_values("file")

    @property
    def class_names(self) -> list[str]:
        """The name of the class of each row's sample; ``""`` if the run did not write it."""
        return self._sample_values("class")

    @property
    def names(self) -> list[str]:
        """A name for each row: its sample's file, else ``val 17``; for the row of a whole firing its step."""
        names: list[str] = []
        rows = zip(self.files, self.splits, self.sample_ids.tolist(), self.steps.tolist(), strict=True)
        for file, split, sample, step in rows:
            if file:
                names.append(file)
            elif sample >= 0:
                names.append(f"{split} {sample}".strip())
            else:
                names.append(f"step {step}")
        return names

    def frame(self) -> Any:
        """A pandas table with a line for each row, whose `vector` is the row as a NumPy array of its shape.

        Its other columns are `sample`, `split`, `file`, `class`, `position` and `text`; what a row does not have is a
        missing value. HookrunError if pandas is not installed.
        """
        columns: dict[str, list[Any]] = {
            "sample": _missing_below_0(self.sample_ids),
            "split": self.splits,
            "file": self.files,
            "class": self.class_names,
            "position": _missing_below_0(self.positions),
            "text": self.text,
            "vector": [_as_array(row) for row in self],
        }
        return as_table(columns, "pandas")

    def plot(self) -> Any:
        """The pictures of the page: notebooks show them, `save` writes them into a file. HookrunError without any."""
        return ask_report("plot_of_capture", self._samples.folder, self)

    def _sample_values(self, column: str) -> list[str]:
        lines = self._samples.by_sample
        if not lines:
            return [""] * len(self)
        names = zip(self.splits, self.sample_ids.tolist(), strict=True)
        return [str(lines.get(name, {}).get(column) or "") for name in names]

    def where(
        self,
        *,
        sample: int | None = None,
        epoch: int | None = None,
        step: int | None = None,
        call: int | None = None,
        rank: int | None = None,
        split: Split | None = None,
        position: int | None = None,
        token: int | None = None,
    ) -> Tensor:
        """[n] int64: the indices of the rows for which all given values match."""
        part = None
        if split is not None:
            if split not in SPLITS:
                raise HookrunError(
                    f"{self.label}: there is no split {split!r}, there are {', '.join(SPLITS)}"
                )
            part = SPLITS.index(split)
        table, _ = self._table
        matching = torch.ones(len(self), dtype=torch.bool, device="cpu")
        for column, value in enumerate((sample, epoch, step, call, rank, part, position, token)):
            if value is not None:
                matching &= table[:, column] == value
        return matching.nonzero().squeeze(1)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Tensor:
        _ = self._table  # checks that the rows exist before memory is allocated for them
        positions = self._positions(index)
        if positions.dim() == 0:
            return self._read(positions.reshape(1))[0]
        return self._read(positions)

    def numpy(self, index: int | slice | Sequence[int] | Tensor = slice(None)) -> Any:
        """The rows as a NumPy array; bfloat16 and 8-bit floats, which NumPy does not have, become float32."""
        return _as_array(self[index])

    def batches(self, size: int) -> Iterator[Tensor]:
        """The rows in order as tensors [size, ...]; the last one may have fewer rows."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        kinds = set(map(_kind_of, self._parts))
        texts = [f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds)]
        text = " or ".join(first_lines(texts, _SHOWN_ROWS))
        return f"<{self.label}: {len(self)} rows of {text}>"

    def _view(self) -> View:
        first = self.of_shards(1)
        first = first.chosen(torch.arange(min(len(first), _SHOWN_ROWS)))
        rows: list[tuple[str, str]] = []
        for name, text, values in zip(first.names, first.text, first, strict=True):
            numbers = [f"{value:.4g}" for value in values.flatten()[:_SHOWN_VALUES].tolist()]
            rows.append((f"{name} {text}".rstrip(), "  ".join(numbers)))
        return View(repr(self)[1:-1], ("row", "first values"), rows, len(self))

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """[rows, columns] in row order, and the position of each row in recording order."""
        table = torch.cat([self._table_of(part) for part in self._parts])
        columns = dict(zip(COLUMNS, table.T, strict=True))

        def sorted_by(*names: str) -> Tensor:
            return torch.from_numpy(np.lexsort([columns[name].numpy() for name in reversed(names)]))

        place = ("split", "sample", "position", "key")
        order = sorted_by(*place)
        places = torch.stack([columns[name][order] for name in place], dim=1)
        once = bool((places.diff(dim=0) != 0).any(1).all()) and not (columns["sample"] == FIRING).any()
        if not once:  # the order of recording; with several ranks batch by batch, as in one process
            order = sorted_by("turn", "rank")
        return table[order], order

    def _table_of(self, part: _Part) -> Tensor:
        """[rows of the part, columns]; columns that an earlier version did not write hold their defaults."""
        if isinstance(part.shard, PlainFile):
            columns = part.shard.made_columns(part.entry.rows)
        else:
            stored = read_tensor(self._shards.file_of(part), f"{part.entry.key}.rows")
            columns = dict(zip(part.shard.columns, stored.T, strict=True))
        least = torch.tensor(_LEAST, dtype=torch.int64, device="cpu")
        table = least.repeat(part.entry.rows, 1)
        for place, name in enumerate(COLUMNS):
            if name in columns:
                table[:, place] = columns[name]
        if (table < least).any() or (table[:, COLUMNS.index("split")] >= len(SPLITS)).any():
            raise StoreError(
                f"{self.label}: {part.shard.file} holds rows of impossible samples, steps or splits"
            )
        return table

    def _positions(self, index: int | slice | Sequence[int] | Tensor) -> Tensor:
        """The index as non-negative row numbers, int64: [n], or [] for an int."""
        if isinstance(index, slice):
            chosen = range(*index.indices(len(self)))
            return torch.arange(len(chosen), device="cpu") * chosen.step + chosen.start
        positions = whole_numbers(index)
        if positions is None or positions.dim() > 1:
            raise IndexError(f"{self.label}: rows are chosen by an int, a slice, or a list or tensor of ints")
        outside = (positions < -len(self)) | (positions >= len(self))
        if outside.any():
            raise IndexError(f"{self.label}: no row {int(positions[outside][0])}, there are {len(self)}")
        return torch.where(positions < 0, positions + len(self), positions)

    def _common(self, parts: Sequence[_Part]) -> tuple[torch.dtype, tuple[int, ...]]:
        kinds = set(map(_kind_of, parts))
        if len(kinds) > 1:
            some = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds)[:4])
            if len(kinds) > 4:
                some += ", …"
            raise HookrunError(
                f"{self.label}: rows of {len(kinds)} kinds ({some}) "
                "do not fit into one tensor. Read row by row: [row for row in capture]"
            )
        dtype, shape = kinds.pop()
        return _DTYPES[dtype], shape

    def _read(self, positions: Tensor) -> Tensor:
        recorded, targets = self._table[1][positions].sort()
        places = torch.searchsorted(recorded, self._bounds)
        touched = places.diff().nonzero().squeeze(1).tolist()
        dtype, shape = self._common([self._parts[number] for number in touched] or self._parts)
        out = torch.empty((len(positions), *shape), dtype=dtype, device="cpu")
        for number in touched:
            inside = slice(*places[number : number + 2].tolist())
            rows = recorded[inside] - self._bounds[number]
            self._fill(as_bytes(out), self._parts[number], rows, targets[inside])
        return out

    def _fill(self, out: Tensor, part: _Part, rows: Tensor, targets: Tensor) -> None:
        """Copy rows of a part, ascending with repetitions, to their targets; of the file only these rows are read."""
        are_neighbours = bool((torch.stack([rows, targets]).diff() == 1).all())
        first = int(rows[0])
        place = int(targets[0])
        if are_neighbours and len(rows) * out.shape[1] >= _READ_AT_ONCE:
            self._shards.read(part, [range(first, first + len(rows))], out[place : place + len(rows)])
            return
        tensor = read_tensor(self._shards.file_of(part), part.entry.key)
        stored = as_bytes(tensor.reshape(part.entry.rows, *part.entry.shape))
        if are_neighbours:  # copied at once
            out[place : place + len(rows)] = stored[first : first + len(rows)]
        else:
            out[targets] = stored[rows]


Leaf = StoredCapture | Lookup[StoredCapture]
"""The captures of a hook at a module: one tensor, or the tensors of a container by their paths."""


class _Shards:
    """Opens the shards of a folder and keeps some open; a copy or a pickle opens the files itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened = lru_cache(maxsize=_OPEN_SHARDS)(partial(_open_shard, folder))

    def file_of(self, part: _Part) -> Any:
        """The open shard of a part. StoreError if its tensors are not as the index describes them."""
        path = self.folder / part.shard.file
        entry = part.entry
        file = self._opened(part.shard.file, part.shard.bytes)
        _require_tensor(file, path, entry.key, part.stored_shape, STORED_DTYPES[entry.dtype])
        columns = len(part.shard.columns)
        if columns:
            _require_tensor(file, path, f"{entry.key}.rows", [entry.rows, columns], STORED_DTYPES["int64"])
        return file

    def read(self, part: _Part, pieces: Sequence[range], out: Tensor) -> None:
        """Read pieces of neighbouring rows of a part, past any mapped memory, one after the other into `out`.

        out: [rows of all pieces, bytes of a row] uint8

        StoreError if the file is not as its index says.
        """
        path = self.folder / part.shard.file
        entry = part.entry
        size = out.shape[1]
        with open_inside(path, self.folder.parent) as file:
            require_bytes(file, path, part.shard.bytes, says="its index")
            start = tensor_start(file, path, entry.key, part.stored_shape, STORED_DTYPES[entry.dtype])
            for piece in pieces[1:]:
                start_reading(file, start + piece.start * size, len(piece) * size)
            for piece in pieces:
                place = start + piece.start * size
                target = out[: len(piece)].view(-1).numpy().data
                while target:
                    count = os.preadv(file.fileno(), [target], place)
                    if not count:
                        raise StoreError(f"{path} is shorter than its index says: it was changed or cut off")
                    target = target[count:]
                    place += count
                out = out[len(piece) :]

    def __reduce__(self) -> tuple[type[_Shards], tuple[Path]]:
        return type(self), (self.folder,)


def _require_tensor(file: Any, path: Path, name: str, shape: list[int], dtype: str) -> None:
    """StoreError unless the open file has a tensor of this name, shape and dtype."""
    try:
        stored = file.get_slice(name)
    except SafetensorError as error:
        raise StoreError(f"{path} lacks the tensor {name!r} that its index names") from error
    if stored.get_shape() != shape or stored.get_dtype() != dtype:
        found = f"{stored.get_dtype()} {stored.get_shape()}"
        raise StoreError(f"{path}: the tensor {name!r} is {found} where its index says {dtype} {shape}")


def _open_shard(folder: Path, name: str, size: int) -> Any:
    """The shard's file as safetensors' lazy reader. StoreError if it has not this many bytes."""
    require_size(folder / name, folder.parent, size, says="its index")
    return open_tensors(folder / name, folder.parent)


def stored_tensors(
    folder: Path, shards: Sequence[Shard | PlainFile], samples: SampleTable | None = None
) -> list[StoredCapture]:
    """Every captured tensor, in the order of the first recordings. No shard is opened before a row is read.

    samples: the names of the samples; those of the run by default
    """
    parts: dict[tuple[str, str, str], list[_Part]] = {}
    for shard in shards:
        for entry in shard.entries:
            parts.setdefault((entry.hook, entry.module, entry.path), []).append(_Part(shard, entry))
    opened = _Shards(folder)
    if samples is None:
        samples = SampleTable(folder.parent)
    captures: list[StoredCapture] = []
    for place, of_tensor in parts.items():
        captures.append(StoredCapture(*place, of_tensor, opened, samples, len(captures)))
    return captures


def read_captures(
    folder: Path,
    shards: Sequence[Shard | PlainFile],
    aliases: Mapping[str, str],
    samples: SampleTable | None = None,
) -> Lookup[Lookup[Leaf]]:
    """Hook -> module -> its captures, as `stored_tensors` gives them."""
    hooks: dict[str, Lookup[Leaf]] = {}
    for hook, of_hook in grouped(stored_tensors(folder, shards, samples), attrgetter("hook")).items():
        leaves: dict[str, Leaf] = {}
        for module, tensors in grouped(of_hook, attrgetter("module")).items():
            by_path = {tensor.path: tensor for tensor in tensors}
            leaves[module] = Lookup("tensor", f"{hook} at {module!r}", by_path)
            if list(by_path) == [""]:
                leaves[module] = tensors[0]
        hooks[hook] = Lookup("module", f"the captures of {hook!r}", leaves, aliases)
    run = folder.parent if samples is None else samples.folder
    return Lookup("hook", f"the captures of {run}", hooks)


def captured_tensors(captures: Mapping[str, Mapping[str, Leaf]]) -> Iterator[StoredCapture]:
    """Every captured tensor of every hook at every module."""
    for modules in captures.values():
        for leaf in modules.values():
            if isinstance(leaf, StoredCapture):
                yield leaf
            else:
                yield from leaf.values()


def chosen_tensors(
    captures: Lookup[Lookup[Leaf]], capture: str | None = None, module: str | None = None
) -> list[StoredCapture]:
    """The captured tensors of a hook at a module; None: of every one.

    module: any of its names, or the `tensor_name` of one tensor in its value

    HookrunError with the nearest names if there is none.
    """
    hooks = captures if capture is None else {capture: captures[capture]}
    tensors = list(captured_tensors(hooks))
    if module is None:
        return tensors
    chosen: list[StoredCapture] = []
    for hook, modules in hooks.items():
        if module in modules:
            chosen += captured_tensors({hook: {module: modules[module]}})
        else:
            chosen += [tensor for tensor in tensors if (tensor.hook, tensor.tensor_name) == (hook, module)]
    if tensors and not chosen:
        places = nearest(module, {tensor.tensor_name for tensor in tensors})
        raise HookrunError(f"no module {module!r} in the captures of {listed(map(repr, hooks))}: {places}")
    return chosen


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced, with the first and the last."""
    count = min(most, len(items))
    return [items[n * (len(items) - 1) // max(count - 1, 1)] for n in range(count)]


def _missing_below_0(numbers: Tensor) -> list[int | None]:
    return [number if number >= 0 else None for number in numbers.tolist()]


def _as_array(tensor: Tensor) -> Any:
    try:
        return tensor.numpy()
    except TypeError:  # a dtype that NumPy does not have
        return tensor.float().numpy()


@dataclass(frozen=True)
class SampleTable:
    """Reads the files when they are first needed; empty if the run did not write them.

    folder: the run directory
    """

    folder: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """One line per sample in the order of the run: `split`, `sample`, `file`, `class`, `predicted_class`."""
        return read_records(self.folder / SAMPLES, SampleLine)

    @cached_property
    def by_sample(self) -> Mapping[tuple[str, int], dict[str, Any]]:
        """(split, sample id) -> its line."""
        return {(line["split"], line["sample"]): line for line in self.lines}

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """Token id -> its text, for the tokens of captured rows."""
        return {line["token"]: line["text"] for line in read_records(self.folder / TOKENS, TokenLine)}

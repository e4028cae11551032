"""Writing captured tensors: buffered up to a limit, written as shards by a thread, then indexed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookrun.data.info import SPLITS, Split
from hookrun.engine.actions.base import TokenRows
from hookrun.engine.values.containers import leaves
from hookrun.engine.values.host_copies import HostCopy, copies_of, host_memory
from hookrun.engine.values.index import joined
from hookrun.errors import reason
from hookrun.store.background import Background
from hookrun.store.captures.shard import RowKind, index_name, shard_name
from hookrun.store.captures.tensor_file import Chunks, as_bytes, dtype_name, unstorable, write_tensors
from hookrun.store.files import Lines, StoreError, make_folder, read_lines, replacing
from hookrun.store.format import COLUMNS, FIRING, VERSION
from hookrun.store.states.position import IndexPosition

SHARD_BYTES = 64 * 2**20
BUFFERS = 3
"""One buffer is filled, one may wait, one is written."""

_TABLE_BYTES = 8 * len(COLUMNS)  # per row
_CHUNK_BYTES = 1024  # overhead per chunk, so that many small chunks respect the limit too
_ALIGNMENT = 64  # of a chunk in pinned memory

_MOST_FIRINGS = 2**20  # most calls of a hook at one module in one batch


@dataclass(slots=True)
class Count:
    """What one hook captured at one module: the number of tensors, their bytes, and the rows that they became."""

    tensors: int = 0
    bytes: int = 0
    rows: int = 0


class _Kind(NamedTuple):
    """The rows of one tensor of a hook at a module that agree in all but their number."""

    hook: str
    module: str
    path: str
    dtype: torch.dtype
    shape: torch.Size
    by: RowKind


@dataclass(slots=True)
class _Run:
    """Consecutive chunks of one kind."""

    kind: _Kind
    chunks: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)


@dataclass(slots=True)
class _Buffer:
    """The rows of one shard.

    last:   path of a hook at a module -> its newest run
    bytes:  in memory
    pinned: the memory of rows that come from an accelerator, its first `used` bytes are taken; None: no such rows yet
    copies: of these rows; some may be under way
    """

    runs: list[_Run] = field(default_factory=list)
    last: dict[tuple[str, str, str], _Run] = field(default_factory=dict)
    bytes: int = 0
    pinned: Tensor | None = None
    used: int = 0
    copies: list[HostCopy] = field(default_factory=list)


class CaptureWriter:
    """Writes captured values below `folder`, which is created with the first shard.

    The folder must be empty or missing, or cut back to the position `goes_on`.

    counts: (hook, module) -> what was captured there so far, with the buffer
    shards: the number of shards that are written and indexed
    rank:   of this process in a distributed run
    batch:  returns the number of the current batch, if several ranks write into the folder, each its rows of the batch;
            None: this process is the only writer

    A buffer holds at most `shard_bytes`, or one row if that is larger; each shard is one buffer. While one is filled,
    one may wait and one is written, so memory stays under three buffers. A shard is written under another name,
    flushed, renamed, and only then named in the index: every shard in the index is complete.

    Rows of an accelerator are copied into pinned memory while the program goes on. It gives their buffer to the thread
    that writes when the next one is full, and only then waits for copies that are still under way. Hooks of several
    threads, as autograd has one for each device, add in turn.
    """

    def __init__(
        self,
        folder: Path,
        shard_bytes: int = SHARD_BYTES,
        rank: int = 0,
        batch: Callable[[], int] | None = None,
        goes_on: IndexPosition = IndexPosition(),  # noqa: B008 - immutable
    ) -> None:
        file_rank = rank if batch is not None else 0
        self.folder = folder
        self.counts = dict[tuple[str, str], Count]()
        for hook, modules in goes_on.counts.items():
            for module, counted in modules.items():
                self.counts[hook, module] = Count(*counted)
        self.shards = goes_on.shards
        self._index = Lines(folder / index_name(file_rank), durable=True)
        self._newest: str | None = None  # the SHA-256 of the newest shard
        if goes_on.shards:
            for _, line in read_lines(self._index.path, folder.parent):
                self._newest = line["sha256"]
        self._shard_bytes = shard_bytes
        self._rank = rank
        self._named = partial(shard_name, file_rank)
        self._batch = batch
        self._turns = dict[tuple[str, str], tuple[int, int]]()
        self._columns = COLUMNS if batch is not None else COLUMNS[:-1]
        self._buffer = _Buffer()
        self._full = deque[_Buffer]()  # the oldest first
        self._spare = deque[Tensor]()  # pinned memory of buffers that are written
        self._lock = Lock()
        self._open = True
        self._rows_added = 0
        self._rows_written = 0
        self._disk = Background("hookrun captures", failed=self._tell_lost)

    def add(
        self,
        hook: str,
        module: str,
        value: Any,
        *,
        sample_ids: Sequence[int] | Tensor | None,
        batch_dim: Callable[[str, Sequence[int]], int | None] = lambda path, shape: 0,
        epoch: int,
        step: int,
        call: int,
        split: Split | None = None,
        path: str = "",
        tokens: TokenRows | None = None,
    ) -> None:
        """Record a copy of every tensor in `value`, which is not changed.

        value:      a tensor, or a nested tuple, list, dict, namedtuple or dataclass of tensors
        sample_ids: the samples of the batch, if the value belongs to a batch
        batch_dim:  path and shape of a tensor -> its dimension that is the batch; None: it has none. A tensor that has
                    as many of them as there are samples becomes one row per sample, any other one row per firing
        split:      the split of the samples, `train` or `val`
        path:       the place of `value` in a larger container
        tokens:     the token of each row, if a row is one of a sample's tokens

        StoreError if a tensor cannot be stored, or if the disk refused an earlier one.
        """
        self._disk.raise_error()
        if not self._open:
            raise StoreError(f"{self.folder} is closed: nothing more can be captured")
        samples = None if sample_ids is None else torch.as_tensor(sample_ids, dtype=torch.int64, device="cpu")
        part = -1 if split is None else SPLITS.index(split)
        count = self.counts.setdefault((hook, module), Count())
        turn = 0 if self._batch is None else self._turn((hook, module), self._batch())
        line = (FIRING, epoch, step, call, self._rank, part, -1, -1, -1, turn)[: len(self._columns)]
        of_firing = torch.tensor([line], dtype=torch.int64, device="cpu")
        for inside, leaf in leaves(value):
            if leaf is None:
                continue
            place = joined(path, inside)
            tensor = leaf.detach().dequantize() if leaf.is_quantized else leaf.detach()
            problem = unstorable(tensor)
            if problem:
                at = f"hook {hook!r} at module {module!r}" + (f", {place}" if place else "")
                raise StoreError(f"cannot capture the {leaf.dtype} tensor of {at}: {problem}")
            dim = None if samples is None else batch_dim(place, tensor.shape)
            by_sample = (
                samples is not None
                and dim is not None
                and dim < tensor.dim()
                and tensor.shape[dim] == len(samples)
            )
            if by_sample and dim:
                tensor = tensor.movedim(dim, 0)
            if self._batch is not None and samples is not None and not by_sample:
                raise StoreError(
                    f"cannot capture hook {hook!r} at module {module!r}: a tensor of shape {list(tensor.shape)} in a "
                    f"batch of {len(samples)} rows of this rank: each rank would have another one"
                )
            rows = tensor if by_sample else tensor.unsqueeze(0)
            table = of_firing.repeat(len(rows), 1)
            if by_sample and samples is not None:
                table[:, 0] = samples
            if tokens is not None and by_sample:
                table[:, COLUMNS.index("position")] = tokens.positions
                table[:, COLUMNS.index("token")] = tokens.token_ids
                if tokens.keys is not None:
                    table[:, COLUMNS.index("key")] = tokens.keys
            kind = _Kind(hook, module, place, rows.dtype, rows.shape[1:], "sample" if by_sample else "firing")
            with self._lock:
                self._put(kind, rows, table)
            count.tensors += 1
            count.bytes += tensor.numel() * tensor.dtype.itemsize
            count.rows += len(rows)

    def _turn(self, stream: tuple[str, str], batch: int) -> int:
        """A number for the batch and the firing within it of a hook at a module, equal on every rank."""
        before, count = self._turns.get(stream, (-1, 0))
        count += 1
        if before != batch:
            count = 0
        self._turns[stream] = batch, count
        return batch * _MOST_FIRINGS + min(count, _MOST_FIRINGS - 1)

    def flush(self) -> None:
        """Write the buffered rows as one shard, index it, and wait until that is done.

        After a StoreError the buffered rows are lost and the writer takes no more.
        """
        self._hand_over(flushes=True)
        self._disk.wait()

    def position(self) -> dict[str, Any]:
        """Flush the buffer and return the folder's position, as an IndexPosition."""
        self.flush()
        counts: dict[str, dict[str, tuple[int, int, int]]] = {}
        for (hook, module), count in self.counts.items():
            counts.setdefault(hook, {})[module] = (count.tensors, count.bytes, count.rows)
        turns = self._batch is not None and self.shards > 0
        self._index.sync()
        return {"index": self._index.size(), "shards": self.shards, "counts": counts, "turns": turns}

    def close(self) -> None:
        """Write the buffered rows; the writer takes no more afterwards."""
        try:
            self.flush()
        finally:
            self._open = False
            self._disk.close()
            self._index.close()

    def _hand_over(self, *, flushes: bool = False) -> None:
        """Begin a new buffer, and give the full ones to the thread that writes.

        A full one with copies of a device is kept until the next one is full: until then the device has most likely
        made them, and the program does not wait for it.
        """
        if self._buffer.runs:
            self._full.append(self._buffer)
            self._buffer = _Buffer()
        while self._full and self._open:
            oldest = self._full[0]
            if oldest.copies and not flushes:
                if len(self._full) == 1:
                    return
                self._disk.wait()  # one is filled, one is copied, one is written
            try:
                for copy in oldest.copies:
                    copy.wait()
            except RuntimeError as error:
                self._tell_lost(StoreError(f"cannot copy captured rows to the host: {reason(error)}"))
            self._full.popleft()
            self._disk.put(partial(self._write, oldest))

    def _write(self, buffer: _Buffer) -> None:
        """Write a shard and index it; its memory may then be used again."""
        if self.shards == 0:
            make_folder(self.folder, parents=False)
        self._index.require_there()
        name = self._named(self.shards)
        tensors: dict[str, Chunks] = {}
        entries: list[dict[str, Any]] = []
        for number, run in enumerate(buffer.runs):
            kind = run.kind
            tensors[f"{number}"] = Chunks(kind.dtype, (run.rows, *kind.shape), run.chunks)
            tensors[f"{number}.rows"] = Chunks(torch.int64, (run.rows, len(self._columns)), run.tables)
            dtype = dtype_name(kind.dtype)
            entries.append({"key": f"{number}", **kind._asdict(), "dtype": dtype, "rows": run.rows})
        digest = hashlib.sha256()
        with replacing(self.folder / name) as file:
            size = write_tensors(file, tensors, digest=digest)
        shard = {"version": VERSION, "shard": name, "sha256": digest.hexdigest(), "bytes": size}
        line = {**shard, "follows": self._newest, "columns": self._columns, "entries": entries}
        self._index.extend([line])
        self._newest = digest.hexdigest()
        self.shards += 1
        self._rows_written += sum(run.rows for run in buffer.runs)
        if buffer.pinned is not None:
            self._spare.append(buffer.pinned)

    def _tell_lost(self, error: BaseException) -> None:
        """Accept nothing more after an error of the thread that writes, and say how many rows are lost."""
        self._open = False
        lost = self._rows_added - self._rows_written
        if isinstance(error, StoreError):
            raise StoreError(
                f"{error}\n{lost} captured rows are lost; "
                f"the {self.shards} shards written to {self.folder} before are kept and indexed"
            ) from error

    def _put(self, kind: _Kind, rows: Tensor, table: Tensor) -> None:
        row_bytes = kind.shape.numel() * rows.dtype.itemsize + _TABLE_BYTES
        start = 0
        while True:
            room = self._shard_bytes - self._buffer.bytes - _CHUNK_BYTES
            if room < row_bytes and self._buffer.runs:
                self._hand_over()
                continue
            stop = min(len(rows), start + max(1, room // row_bytes))
            chunk = self._copied(rows[start:stop])
            buffer = self._buffer
            run = buffer.last.get(kind[:3])
            if run is None or run.kind != kind:
                run = buffer.last[kind[:3]] = _Run(kind)
                buffer.runs.append(run)
            run.chunks.append(chunk)
            run.tables.append(table[start:stop])
            self._rows_added += len(chunk)
            buffer.bytes += _CHUNK_BYTES + row_bytes * len(chunk)
            start = stop
            if start >= len(rows):
                return

    def _copied(self, rows: Tensor) -> Tensor:
        """A copy on the CPU; that of an accelerator's rows is complete when its buffer is written."""
        copies = copies_of(rows)
        if copies is None:
            return _copied_now(rows)
        copy = copies.begin(rows, self._pinned(rows.nbytes))
        self._buffer.copies.append(copy)
        return copy.tensor

    def _pinned(self, size: int) -> Tensor:
        """Pinned memory in the buffer; of its own for a row that is larger than a buffer."""
        buffer = self._buffer
        if size > self._shard_bytes:
            return host_memory(size)
        if buffer.pinned is None:
            if self._spare:
                buffer.pinned = self._spare.pop()
            else:
                buffer.pinned = host_memory(self._shard_bytes)
        start = buffer.used
        buffer.used += size + -size % _ALIGNMENT
        return buffer.pinned[start : start + size]


def _copied_now(rows: Tensor) -> Tensor:
    """A copy on the CPU, made by one thread: torch's threads would wait for the cores that hash and write."""
    target = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
    if rows.is_cpu and rows.is_contiguous() and not (rows.is_conj() or rows.is_neg()):
        np.copyto(as_bytes(target).numpy(), as_bytes(rows).numpy())
        return target
    return target.copy_(rows)

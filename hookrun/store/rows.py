"""`hookrun.rows`: captured rows in a nearly uniform random order, at the speed of the disk, in bounded memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

from hookrun.errors import HookrunError, listed
from hookrun.store.background import ahead
from hookrun.store.captures.read import StoredCapture, chosen_tensors
from hookrun.store.captures.tensor_file import as_bytes
from hookrun.store.reader import Run, open_run
from hookrun.store.row_folder import open_folder

Source = Run | str | os.PathLike[str]

Group = tuple[Tensor, NDArray[np.int64]]
"""Bytes [n, bytes of a row] of rows that were read together, and the order in which they are yielded."""

BLOCK_BYTES = 2**18
"""The most bytes of neighbouring rows that are drawn together; a block has at least one row."""

CHUNK_BYTES = 2**19
"""The most bytes of rows that share one piece of memory when they are yielded: a row that is kept keeps it."""

MOST_BYTES = 2**30
"""The most bytes of the buffer, which holds at least two rows."""

_READ_CHUNKS = 16
"""So many chunks are read at once where the order is that of the captures."""

_READERS = 4
"""So many files are read at once, since a disk answers several readers faster than one."""

_VERSION = 1
"""Increased when the same seed gives another order."""


def rows(
    run: Source | Sequence[Source],
    capture: str | None = None,
    module: str | None = None,
    shuffle: bool = True,
    buffer: int = 2**18,
    seed: int = 0,
    rows: Mapping[str, Any] | None = None,
) -> Rows:
    """The captured rows of runs as an iterable data set, which yields a tensor for each row.

    run:     a run or its directory, or a list of them, whose rows follow one another
    capture: the name of the hook; None: the only one
    module:  any name of the module, ``encoder [0]`` for a tensor of a container; None: the only one
    shuffle: in random order; False: in the order of the captures
    buffer:  the most rows in memory, and they take at most `MOST_BYTES`; the workers of a DataLoader divide it
    seed:    of the order, which also depends on the epoch
    rows:    ``{pattern: "*.safetensors", key: GLOB}``: `run` is a folder of files of another program, see `RowFiles`

    HookrunError with the nearest names if there are no such rows, they are of several kinds, or a run is still written.
    """
    sources = [run] if isinstance(run, Run | str | os.PathLike) else list(run)
    if not sources:
        raise HookrunError("rows: found an empty list, expected a run or several")
    if buffer < 1 or seed < 0:
        raise HookrunError(
            f"rows: found buffer={buffer}, seed={seed}; expected at least 1 row, and no negative seed"
        )
    captures = [_only_capture(_opened(source, rows), capture, module) for source in sources]
    first = captures[0]
    for each in captures:
        if (each.dtype, each.shape[1:]) != (first.dtype, first.shape[1:]):
            raise HookrunError(f"rows: the runs have rows of several kinds: {first!r}, {each!r}")
    return Rows(captures, shuffle=shuffle, buffer=buffer, seed=seed)


def _opened(source: Source, rows: Mapping[str, Any] | None) -> Run:
    if rows is not None and not isinstance(source, Run):
        return open_folder(source, rows)
    run = source if isinstance(source, Run) else open_run(source)
    if run.status.get("status") == "running" and not run.cut_off:
        raise HookrunError(f"rows: {run.path} is still being written: wait until the run has ended")
    return run


def _only_capture(run: Run, capture: str | None, module: str | None) -> StoredCapture:
    """The captured tensor of this hook at this module. HookrunError if there is not exactly one."""
    tensors = chosen_tensors(run.captures, capture, module)
    if len(tensors) > 1:
        names = [f"capture={each.hook!r}, module={each.tensor_name!r}" for each in tensors]
        raise HookrunError(f"rows: {run.path} has {len(tensors)} captured tensors, name one: {listed(names)}")
    if not tensors:
        raise HookrunError(f"rows: {run.path} captured nothing")
    if not len(tensors[0]) or not tensors[0].row_bytes:
        raise HookrunError(f"rows: {tensors[0]!r} of {run.path} has no values")
    return tensors[0]


def _part(rows: range, number: int, count: int) -> range:
    """One of `count` parts of the rows; two of them differ by at most one row."""
    return rows[len(rows) * number // count : len(rows) * (number + 1) // count]


class Rows(IterableDataset[Tensor]):
    """The rows of captures, of which each rank, and each worker of a DataLoader, yields its share.

    All ranks together yield each row once in a pass: of N rows in the order of the epoch, rank r of n yields those from
    N * r // n to N * (r + 1) // n, so two ranks differ by at most one row; its workers divide its rows in the same way.
    The same seed and epoch give the same order; without `set_epoch` each pass has that of epoch 0.

    Shuffled, the rows are cut into blocks of neighbours. The blocks are put in random order, read into a half of the
    buffer until it is full, and the rows of this half are yielded in random order while the other half is filled.
    """

    def __init__(self, captures: Sequence[StoredCapture], *, shuffle: bool, buffer: int, seed: int) -> None:
        self._captures = captures
        self._shuffle = shuffle
        self._buffer = buffer
        self._seed = seed
        self._rows = range(sum(map(len, captures)))
        self._row_bytes = captures[0].row_bytes
        self._dtype = captures[0].dtype
        self._shape = captures[0].shape[1:]
        self._chunk_rows = max(1, CHUNK_BYTES // self._row_bytes)
        self._shards = [shard for capture in captures for shard in capture.recorded()]
        self._shard_ends = list(accumulate(rows for rows, _ in self._shards))
        # shared, so that the workers of a DataLoader that stay see it
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()
        self._yielded = 0
        self._skipped = 0  # by the next pass
        self._ranks = (0, 1)

    def __repr__(self) -> str:
        order = "in random order" if self._shuffle else "in order"
        return f"Rows({len(self):,} {order}, of {listed(map(repr, self._captures))})"

    def __len__(self) -> int:
        """The rows that this rank yields."""
        return len(_part(self._rows, *self._rank()))

    def set_epoch(self, epoch: int) -> None:
        """The order of the next pass, also in workers that have started."""
        self._epoch.fill_(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this process is in its share: plain numbers and texts."""
        return {**self._facts(), "epoch": int(self._epoch), "yielded": self._yielded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where the state was made, with the next row.

        HookrunError if the state is of other rows, of another order, or of another rank or worker.
        """
        for key, value in self._facts().items():
            if state.get(key) != value:
                raise HookrunError(f"rows: the state has {key} {state.get(key)}, and this data set {value}")
        self.set_epoch(state["epoch"])
        self._yielded = self._skipped = state["yielded"]

    def __iter__(self) -> Iterator[Tensor]:
        self._yielded = self._skipped
        self._skipped = 0
        groups = self._shuffled(self._yielded) if self._shuffle else self._in_order(self._yielded)
        for stored, order in ahead(groups):
            for start in range(0, len(order), self._chunk_rows):
                # NumPy, since torch's threads would wait for the core that reads
                chunk = stored.numpy().take(order[start : start + self._chunk_rows], axis=0)
                rows = torch.from_numpy(chunk).view(self._dtype).reshape(-1, *self._shape)
                for row in rows.unbind(0):
                    self._yielded += 1
                    yield row
        self._yielded = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ranks": self._rank()}  # a worker that is spawned does not know it

    def _rank(self) -> tuple[int, int]:
        """The number of this rank, and of all."""
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return self._ranks

    def _worker(self) -> tuple[int, int]:
        """The number of this worker among those of all ranks, and of these."""
        rank, ranks = self._rank()
        worker = get_worker_info()
        if worker is None:
            return rank, ranks
        return rank * worker.num_workers + worker.id, ranks * worker.num_workers

    def _facts(self) -> dict[str, Any]:
        """What a state must agree with."""
        return {
            "version": _VERSION,
            "rows": [repr(capture) for capture in self._captures],
            "shuffle": self._shuffle,
            "buffer": self._buffer,
            "seed": self._seed,
            "worker": list(self._worker()),
        }

    def _share(self) -> tuple[range, int]:
        """The rows that this worker yields, in the order of the epoch, and how many a half of its buffer holds."""
        worker, all_workers = self._worker()
        workers = all_workers // self._rank()[1]
        half = min(self._buffer, MOST_BYTES // self._row_bytes) // (2 * workers)
        return _part(self._rows, worker, all_workers), max(1, half)

    def _in_order(self, skipped: int) -> Iterator[Group]:
        """The rows of the share, without those that are skipped."""
        share, half = self._share()
        size = min(half, _READ_CHUNKS * self._chunk_rows)
        before = 0
        for capture in self._captures:
            inside = range(max(share.start + skipped - before, 0), min(share.stop - before, len(capture)))
            for start in inside[::size]:
                stored = as_bytes(capture[start : min(start + size, inside.stop)])
                yield stored, np.arange(len(stored))
            before += len(capture)

    def _shuffled(self, skipped: int) -> Iterator[Group]:
        """The same in the random order of the epoch."""
        seed = (self._seed, int(self._epoch))
        count = -(-len(self._rows) // max(1, BLOCK_BYTES // self._row_bytes))
        bounds = len(self._rows) * np.arange(count + 1) // count
        order = np.random.default_rng(seed).permutation(count)
        ends = np.diff(bounds)[order].cumsum()
        share, most = self._share()
        # NumPy's memory has large pages, which are faster to get.
        buffer = torch.from_numpy(np.empty((2, min(most, len(share)), self._row_bytes), np.uint8))
        groups = -(-len(share) // most)
        for number in range(groups):
            group = _part(share, number, groups)
            beyond = max(share.start + skipped - group.start, 0)
            if beyond >= len(group):
                continue
            first, last = np.searchsorted(ends, [group.start, group.stop - 1], side="right")
            starts = bounds[order[first : last + 1]]
            stops = bounds[order[first : last + 1] + 1]
            starts[0] = stops[0] - (ends[first] - group.start)
            stops[-1] -= ends[last] - group.stop
            half = buffer[number % 2, : len(group)]
            starts.sort()
            stops.sort()
            are_apart = starts[1:] != stops[:-1]
            starts = starts[np.append(True, are_apart)]
            stops = stops[np.append(are_apart, True)]
            self._read(map(range, starts.tolist(), stops.tolist()), half)
            yield half, np.random.default_rng((*seed, group.start)).permutation(len(group))[beyond:]

    def _read(self, pieces: Iterable[range], out: Tensor) -> None:
        """Read ascending pieces of the rows in the order of recording, one after the other into `out`."""
        of_shards = defaultdict[int, list[range]](list)
        for piece in pieces:
            while piece:
                number = bisect_right(self._shard_ends, piece.start)
                end = self._shard_ends[number]
                first = end - self._shards[number][0]
                inside = range(piece.start, min(piece.stop, end))
                of_shards[number].append(range(inside.start - first, inside.stop - first))
                piece = piece[len(inside) :]
        with ThreadPoolExecutor(_READERS) as readers:
            reading: list[Future[None]] = []
            for number, of_shard in of_shards.items():
                count = sum(map(len, of_shard))
                _, read = self._shards[number]
                reading.append(readers.submit(read, of_shard, out[:count]))
                out = out[count:]
            for each in reading:
                each.result()

"""Communication between the processes of a run: sums, texts and failures."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hookrun.engine.values.private_names import require
from hookrun.errors import HookrunError
from hookrun.run.ranks import Ranks, Started
from hookrun.signals import ignore_next

_JOINED = "hookrun/joined"
_STORE_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
_FAILED = "failed"
_PRESENT = "present/{}"
_LEFT = "left/{}"
_ROLL_CALL = 3.0
"""Seconds in which the other ranks must answer after a rank has lost contact, and leave after that."""
_TOLD = 20.0
"""Seconds in which the other ranks must leave after this one, which has not lost contact, told them why it failed."""
_LET_GO = 1.0
"""Seconds to wait until no thread holds the tensors of a collective."""
_MOST_TEXT = 4000
"""Characters of an error message that are sent to the other ranks."""


class RankFailed(HookrunError):
    """Another rank of the run failed or ended; the message names it.

    exit_code: the exit code of the failed rank
    """

    _is_told = True

    def __init__(self, text: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(text)


class RankGroup(Ranks):
    """Several processes, connected by torch.distributed.

    failed: this rank has failed or has lost contact
    """

    several = True

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank = rank
        self.size = size
        self.failed = False
        self._time_to_leave = _ROLL_CALL
        self._store = store

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in float64."""
        return self._reduced(values, torch.float64, distributed.ReduceOp.SUM)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks."""
        return self._reduced(values, torch.int64, distributed.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], dtype: torch.dtype, operation: Any) -> list[Any]:
        tensor = torch.tensor(list(values), dtype=dtype, device="cpu")
        distributed.all_reduce(tensor, operation)
        _released(tensor)
        return tensor.tolist()

    def gathered(self, plain: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks, with tensors on the CPU; see `Ranks`."""
        content = io.BytesIO()
        torch.save(plain, content)
        mine = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)
        size = torch.tensor([len(mine)], device="cpu")
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        distributed.all_gather(sizes, size)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(parts, padded)
        _released(size, padded, *sizes, *parts)
        values: list[Any] = []
        for part, length in zip(parts, sizes, strict=True):
            stored = io.BytesIO(part[: int(length)].numpy().tobytes())
            values.append(torch.load(stored, map_location="cpu", weights_only=True))
        return values

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks, in place."""
        for tensor in tensors:
            distributed.all_reduce(tensor)

    def from_main(self, tensors: Sequence[Tensor]) -> None:
        """Copy the content of rank 0's tensors into these, in place."""
        for tensor in tensors:
            if 0 in tensor.stride() and tensor.numel() > 1:  # an expanded tensor cannot be written to
                continue
            dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
            content = tensor.detach().to(dtype).contiguous()
            distributed.broadcast(content, 0)
            _released(content)
            with torch.no_grad():
                tensor.copy_(content)

    def meet(self) -> None:
        """Wait until every rank has called this (a barrier)."""
        self.largest([0])

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """A context: if it fails, the error is sent to the other ranks; if another rank failed, its error is raised.

        Raises RankFailed instead of the error of torch.distributed about a rank that has ended.
        """
        try:
            yield
        except BaseException as error:
            self.failed = True
            ignore_next()
            if isinstance(error, RankFailed):
                raise
            is_lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
            if not is_lost and not isinstance(error, distributed.DistError):  # it comes from this rank
                self._tell(error)
                if isinstance(error, HookrunError):
                    error._is_told = True
                raise
            try:
                cause = self._cause(error)
            except Exception:
                cause = RankFailed(
                    f"rank 0, or torchrun, is gone: rank {self.rank} has lost contact: {_first_line(error)}"
                )
            raise cause from error

    def _tell(self, error: BaseException) -> None:
        """Store the failure of this rank for the others, if it is the first failure."""
        text = str(error) or type(error).__name__
        if not isinstance(error, HookrunError | KeyboardInterrupt):
            text = f"{type(error).__name__}: {text}"
        failure = {"rank": self.rank, "text": text[:_MOST_TEXT], "code": getattr(error, "exit_code", 1)}
        self._time_to_leave = _TOLD
        with suppress(Exception):  # the store belongs to rank 0 or torchrun, which may have ended
            self._store.compare_set(_FAILED, "", json.dumps(failure))

    def _cause(self, error: BaseException) -> RankFailed:
        """The error for a rank that did not answer."""
        self._store.set(_PRESENT.format(self.rank), "here")
        end = time.monotonic() + _ROLL_CALL
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while missing:
            if self._store.check([_FAILED]) and (content := self._store.get(_FAILED)):
                failure = json.loads(content)
                text = f"rank {failure['rank']} failed: {failure['text']}"
                return RankFailed(text, int(failure["code"]))
            missing = [rank for rank in missing if not self._store.check([_PRESENT.format(rank)])]
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        first = _first_line(error)
        if not missing:
            return RankFailed(f"the ranks have lost contact with each other: {first}")
        names = ", ".join(map(str, missing))
        who = f"rank {names} is" if len(missing) == 1 else f"ranks {names} are"
        return RankFailed(
            f"{who} gone, or did not answer within compute.timeout; its own output says why, or the system's log where "
            f"it was killed ({first})"
        )

    def leave_after_failure(self) -> None:
        """End the group, so that ranks that wait for this one stop waiting; rank 0 stays until they know why.

        The store that holds the reason ends with rank 0, unless it is torchrun's.
        """
        if self.rank:
            with suppress(Exception):  # rank 0 is gone
                self._store.set(_LEFT.format(self.rank), "left")
        distributed.distributed_c10d._abort_process_group()
        if self.rank or os.environ.get(_STORE_OF_TORCHRUN) == "True":
            return
        names = [_LEFT.format(rank) for rank in range(1, self.size)]
        end = time.monotonic() + self._time_to_leave
        while not self._store.check(names) and time.monotonic() < end:
            time.sleep(0.01)


def _released(*tensors: Tensor) -> None:
    """Wait until gloo's threads have let go of the tensors of a finished collective.

    The last owner frees a tensor, for which it needs Python's lock: a program that ends meanwhile aborts.
    """
    end = time.monotonic() + _LET_GO
    count = attrgetter("_use_count")  # which the stubs of torch 2.14 do not have
    while any(count(tensor)() > 1 for tensor in tensors) and time.monotonic() < end:
        time.sleep(0)  # another thread gets Python's lock


def _first_line(error: BaseException) -> str:
    """The first line of the error's message; without a message the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_LOST = re.compile(
    r"gloo/transport|Connection closed by peer|Connection reset by peer|Timed out waiting|\[Rank \d+\].*timeout"
)


@contextmanager
def joined(started: Started, device: str, timeout: float) -> Iterator[RankGroup]:
    """Open the process group, and close it at the end of the block.

    device:  type of the device of tensors; gloo is used for the CPU, NCCL as well for CUDA
    timeout: seconds without an answer after which a rank counts as failed

    Raises HookrunError if the processes do not find each other.
    """
    if distributed.is_initialized():
        raise HookrunError("compute.strategy: this process has a process group already: start it by torchrun")
    require("torch, ranks")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        devices = torch.cuda.device_count()
        if started.local >= devices:
            raise HookrunError(
                f"compute.device: rank {started.rank} is process {started.local} of its machine, which has {devices} "
                "CUDA devices: start at most one process for each device"
            )
        torch.cuda.set_device(started.local)
    size = started.size
    limit = timedelta(seconds=timeout)
    try:
        shared, *_ = next(rendezvous("env://", started.rank, size, timeout=limit))
        # torchrun's store still has the addresses and the failures of earlier groups of the same processes
        number = (shared.add(_JOINED, 1) - 1) // size
        store = PrefixStore(f"hookrun/{number}", shared)
        distributed.init_process_group(
            backend, store=store, rank=started.rank, world_size=size, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        raise RankFailed(
            f"compute.timeout: rank {started.rank} of {size} did not connect to the other ranks within {timeout:g} "
            f"seconds: {_first_line(error)}: check that every process was started"
        ) from error
    group = RankGroup(started.rank, size, store)
    try:
        yield group
    finally:
        with suppress(Exception):  # closing a group that has lost a rank may fail
            if group.failed:
                group.leave_after_failure()
            else:
                distributed.destroy_process_group()

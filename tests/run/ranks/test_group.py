"""Ranks sum, gather and copy what each of them has, and a failure of one is told to all, with who it was."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier, local
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed

from hookrun.errors import CheckFailed, HookrunError
from hookrun.run.ranks import Started, group
from hookrun.run.ranks.group import RankFailed, RankGroup, joined

LOST = "[Rank 0] gloo/transport/tcp/pair.cc: Connection closed by peer"


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire(3)
    monkeypatch.setattr(group, "distributed", made)
    return made


def test_every_rank_has_the_numbers_of_all(wire: Wire) -> None:
    def act(ranks: RankGroup) -> Any:
        plain = {"rank": ranks.rank, "text": "ä" * 100 * ranks.rank, "none": None}
        return (
            ranks.total([0.1, 2**53 * (ranks.rank == 1)]), ranks.largest([-ranks.rank - 5, ranks.rank]),
            ranks.gathered(plain), ranks.is_main, ranks.total([]), ranks.meet(),
        )  # fmt: skip

    found = wire.on_all(act)
    every = [{"rank": rank, "text": "ä" * 100 * rank, "none": None} for rank in range(3)]
    for rank, (total, largest, gathered, is_main, nothing, _) in enumerate(found):
        assert total == [pytest.approx(0.3, abs=1e-15), 2**53]
        assert largest == [-5, 2]
        assert gathered == every
        assert is_main == (rank == 0)
        assert nothing == []


def test_tensors_of_rank_0_are_copied_in_place(wire: Wire) -> None:
    def act(ranks: RankGroup) -> Any:
        rows = torch.full((2, 3), float(ranks.rank), requires_grad=True)
        flags = torch.tensor([ranks.rank == 0])
        columns = torch.full((3, 2), ranks.rank).t()
        shared = torch.tensor([ranks.rank]).expand(4)
        ranks.from_main([rows, flags, columns, shared])
        summed = torch.tensor([1.0 + ranks.rank])
        ranks.sum_([summed])
        return rows.tolist(), flags.tolist(), columns.tolist(), shared.tolist(), summed.item()

    for rank, (rows, flags, columns, shared, summed) in enumerate(wire.on_all(act)):
        assert rows == [[0.0] * 3] * 2
        assert flags == [True]
        assert columns == [[0] * 3] * 2
        assert shared == [rank] * 4, "an expanded tensor cannot be written to"
        assert summed == 6.0


class Held:
    """A tensor that other threads hold: so many owners, each time that it is asked."""

    def __init__(self, *owners: int) -> None:
        self.owners = list(owners)

    def _use_count(self) -> int:
        return self.owners.pop(0) if len(self.owners) > 1 else self.owners[0]


def test_a_collective_waits_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Held(3, 2, 1)
    group._released(cast(Tensor, tensor))
    assert tensor.owners == [1]
    monkeypatch.setattr(group, "_LET_GO", 0.01)
    tensor = Held(2)
    group._released(cast(Tensor, tensor))  # ends, though it is held


def pair() -> tuple[RankGroup, RankGroup]:
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=1))
    return RankGroup(0, 2, store), RankGroup(1, 2, store)


def told(ranks: RankGroup, error: BaseException) -> BaseException:
    """What is raised where a rank fails with this error."""
    with pytest.raises(BaseException) as caught, ranks.failures_told():
        raise error
    assert ranks.failed
    return caught.value


@pytest.mark.parametrize(
    "error, text, code",
    [
        (CheckFailed("found inf"), "found inf", 3),
        (HookrunError("no rows"), "no rows", 1),
        (ValueError("ä"), "ValueError: ä", 1),
        (ZeroDivisionError(), "ZeroDivisionError: ZeroDivisionError", 1),
        (KeyboardInterrupt(), "KeyboardInterrupt", 1),
        (RuntimeError("x" * 9000), "RuntimeError: " + "x" * 3986, 1),
    ],
)
def test_a_failure_is_told_to_the_others(error: BaseException, text: str, code: int) -> None:
    first, other = pair()
    assert told(other, error) is error
    third = RankGroup(2, 3, other._store)
    told(third, HookrunError("a later one"))
    found = told(first, RuntimeError(LOST))
    assert isinstance(found, RankFailed)
    assert str(found) == f"rank 1 failed: {text}"
    assert found.exit_code == code
    assert told(first, found) is found, "through a block around it"


def test_ranks_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_ROLL_CALL", 0.0)
    first, other = pair()
    assert str(told(first, RuntimeError(LOST))).startswith("rank 1 is gone, or did not answer")
    third = RankGroup(2, 4, first._store)
    assert str(told(third, distributed.DistBackendError("nccl"))).startswith("ranks 1, 3 are gone")
    one, two = pair()
    told(one, RankFailed("rank 1 failed: x"))
    assert str(told(two, RuntimeError(LOST))).startswith("rank 0 is gone"), "what was told is not told again"
    assert str(told(two, distributed.DistBackendError())).endswith("(DistBackendError)")
    said = str(told(other, RuntimeError(f"{LOST}\nmore")))
    assert said == f"the ranks have lost contact with each other: {LOST}"


def test_a_store_that_is_gone_with_rank_0_is_told() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise distributed.DistNetworkError("Broken pipe")

    lonely = RankGroup(1, 2, Gone())  # type: ignore[arg-type]
    assert str(told(lonely, RuntimeError(LOST))).startswith("rank 0, or torchrun, is gone: rank 1 has lost")
    own = ValueError("its own")
    assert told(RankGroup(1, 2, Gone()), own) is own  # type: ignore[arg-type]


def test_a_group_is_open_in_its_block_alone(monkeypatch) -> None:
    me = Started(0, 1, 0)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(HookrunError, match=r"compute\.timeout: rank 0 of 1 did not connect .* within 5 s"):
        joined(me, "cpu", 5).__enter__()
    store = distributed.HashStore()  # one for all groups, as torchrun's
    monkeypatch.setattr(group, "rendezvous", lambda *args, **options: iter([(store, 0, 1)]))
    for fails in (True, False):
        with joined(me, "cpu", 5) as ranks:
            assert distributed.is_initialized()
            assert ranks.gathered("x") == ["x"]
            with pytest.raises(HookrunError, match="has a process group already"):
                joined(me, "cpu", 5).__enter__()
            assert not ranks._store.check(["failed"]), "that of the group before"
            if fails:
                told(ranks, HookrunError("no rows"))
        assert not distributed.is_initialized()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(HookrunError, match="rank 3 is process 3 of its machine, which has 2 CUDA devices"):
        joined(Started(3, 4, 3), "cuda", 5).__enter__()


class Wire:
    """torch.distributed between threads, one for each rank."""

    ReduceOp = distributed.ReduceOp
    DistError = distributed.DistError

    def __init__(self, size: int) -> None:
        self.size, self.me, self.sent = size, local(), [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=30)

    def exchanged(self, tensor: Tensor) -> list[Tensor]:
        self.sent[self.me.rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> None:
        every = torch.stack(self.exchanged(tensor))
        tensor.copy_(every.amax(0) if op == distributed.ReduceOp.MAX else every.sum(0))

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> None:
        for place, each in zip(into, self.exchanged(tensor), strict=True):
            place.copy_(each)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        assert tensor.is_contiguous()
        assert tensor.dtype is not torch.bool, "not every backend takes these"
        tensor.copy_(self.exchanged(tensor)[source])

    def on_all(self, act: Callable[[RankGroup], Any]) -> list[Any]:
        """What each rank returns."""

        def one(rank: int) -> Any:
            self.me.rank = rank
            return act(RankGroup(rank, self.size, distributed.HashStore()))

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(one, range(self.size)))

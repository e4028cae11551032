"""Which rank a process is, its part of a batch, and the sums of a run of one process, which are its own values."""

from __future__ import annotations

import pytest
import torch

from hookrun.engine.rank import own_rank
from hookrun.errors import SpecError
from hookrun.run.ranks import ALONE, Started, is_main, share, size_of_world, started

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_there_is_one_process() -> None:
    assert started() is None and size_of_world() == 1 and is_main()


def test_the_rank_and_the_rank_on_its_machine_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("4", "3", "1", "localhost"), strict=True):
        monkeypatch.setenv(name, value)
    assert started() == Started(rank=3, size=4, local=1)
    assert size_of_world() == 4 and not is_main()
    monkeypatch.setenv("RANK", "0")
    assert is_main()


def test_several_processes_without_a_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(SpecError, match=r"2 processes .*\n *start it by torchrun"):
        started()


def test_one_process_is_the_main_one_and_keeps_its_values() -> None:
    tensor = torch.tensor([1.0, 2.0])
    ALONE.sum_([tensor])
    ALONE.from_main([tensor])
    ALONE.meet()
    assert ALONE.is_main and not ALONE.several and (ALONE.rank, ALONE.size) == (0, 1)
    assert ALONE.total([1.5, 2]) == [1.5, 2] and ALONE.largest([3]) == [3]
    assert ALONE.gathered({"a": 1}) == [{"a": 1}]
    assert tensor.tolist() == [1, 2]
    assert own_rank() == 0


def test_the_shares_of_all_ranks_are_the_batch() -> None:
    for count in range(9):
        for size in (1, 2, 3, 5):
            shares = [share(count, rank, size) for rank in range(size)]
            assert [place for each in shares for place in each] == list(range(count)), (count, size)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1, (count, size)

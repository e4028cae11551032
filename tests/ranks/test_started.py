"""torchrun's environment variables say which rank a process is; an incomplete set is refused."""

from __future__ import annotations

import pytest

from hookrun.errors import SpecError
from hookrun.ranks.started import Started, is_main, size_of_world, started

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

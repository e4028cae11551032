"""`max_bytes` under several ranks: together they keep what one process would keep of the same batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hookrun.ranks.alone import Ranks
from hookrun.runtime.clock import Clock
from hookrun.runtime.records import Budget
from hookrun.runtime.site import HookSite
from hookrun.tasks.loop.rank_budgets import BudgetsOfRanks, Key, in_order


class Thread(Ranks):
    """A rank in a thread of its own."""

    several = True

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._barrier = rank, len(table), table, barrier

    def gathered(self, plain: Any) -> list[Any]:
        self._table[self.rank] = plain
        self._barrier.wait(timeout=30)
        found = list(self._table)
        self._barrier.wait(timeout=30)
        return found


def on_ranks(size: int, run: Callable[[Ranks], Any]) -> list[Any]:
    table, barrier = list[Any]([None] * size), threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(Thread(rank, table, barrier)), range(size)))


class Captures:
    """What the hooks of a rank keep, each of `limit` bytes; a row of a batch holds its number, in 4 bytes."""

    def __init__(self, **limits: int) -> None:
        self.kept = list[tuple[str, int, int, list[float]]]()
        self.said, self.told = list[str](), list[tuple[str, Any]]()
        self.clock = Clock(torch.nn.Identity())
        self.budgets = BudgetsOfRanks()
        self.sites = {name: self.site(name) for name in limits}
        for name, limit in limits.items():
            self.budgets.add(self.sites[name], Budget(limit))

    def site(self, name: str) -> HookSite:
        firing = SimpleNamespace(within="", of_call=0)
        made = SimpleNamespace(
            hook_name=name, path="fc", call=0, clock=self.clock, current=firing,
            emit=lambda record: self.told.append((name, record)),
        )  # fmt: skip
        return cast(HookSite, made)

    def fire(self, name: str, rows: Tensor) -> None:
        site = self.sites[name]

        def keep(value: Any, places: Any = None, tokens: Any = None) -> None:
            firing = site.current
            assert (firing.within, firing.of_call) == (".a", 0)
            self.kept.append((name, self.clock.epoch, self.clock.step, value.tolist()))

        if len(rows):
            site.current.within = ".a"
            self.budgets.hold(site, keep, rows.clone(), None, None, len(rows), 4 * len(rows))


BATCHES = [torch.arange(0.0, 5), torch.arange(5.0, 6), torch.arange(6.0, 9), torch.arange(9.0, 14)]


@pytest.mark.cases("limit", [0, 3, 4, 24, 30, 36, 1000])
@pytest.mark.cases("size", [1, 2, 4])
def test_any_number_of_ranks_keeps_the_rows_of_one_process(limit: int, size: int) -> None:
    """Of the firing that does not fit, the first rows of the whole batch; afterwards nothing more."""
    rows = [row for batch in BATCHES for row in batch.tolist()]

    def run(ranks: Ranks) -> Captures:
        mine = Captures(seen=limit, other=8)
        for step, batch in enumerate(BATCHES):
            mine.clock.step = step
            mine.fire("seen", batch.tensor_split(ranks.size)[ranks.rank])
            mine.clock.step = step + 1  # it is written as at its firing
            mine.budgets.settle(ranks, mine.said.append)
            assert mine.clock.step == step + 1
        return mine

    found = on_ranks(size, run)
    kept = sorted((step, *row) for each in found for _, _, step, row in each.kept)
    assert [number for _, *part in kept for number in part] == rows[: limit // 4]
    assert {step for step, *_ in kept} == {0, 1, 2, 3}.intersection(
        step for step, batch in enumerate(BATCHES) if batch[0] < limit // 4
    )
    spent = limit < 4 * len(rows)
    assert [each.told for each in found] == [[("seen", {"spent": limit})] * spent, *[[]] * (size - 1)]
    assert [len(each.said) for each in found] == [spent, *[0] * (size - 1)], "rank 0 says it once"


def test_a_value_without_rows_is_kept_by_all_ranks_or_by_none_and_each_hook_has_its_own_budget() -> None:
    """Also after a batch of which another rank had no row."""

    def run(ranks: Ranks) -> list[Any]:
        mine, kept = Captures(few=17, many=80), list[Any]()
        for batch in (["few"] if ranks.rank else [], ["few", "many"], ["few", "many"]):
            for name in batch:
                mine.budgets.hold(
                    mine.sites[name], lambda each, *_: kept.append(each), name, None, None, None, 4
                )
            mine.budgets.settle(ranks, mine.said.append)
        return kept

    assert on_ranks(2, run) == [["few", "many", "many"], ["few", "few", "many", "many"]]


def test_firings_of_all_ranks_are_taken_in_an_order_that_agrees_with_each() -> None:
    whole: list[Key] = [("hook", path, "", 0, 1) for path in "abcd"]
    parts = [list(part) for count in range(5) for part in itertools.combinations(whole, count)]
    for lists in itertools.product(parts, repeat=3):
        found = in_order(lists)
        assert sorted(found) == sorted({key for each in lists for key in each})
        for each in lists:
            assert [key for key in found if key in each] == each, (lists, found)
    assert in_order([whole[:2], whole[1::-1]]) == whole[:2], "the first list decides what two contradict"

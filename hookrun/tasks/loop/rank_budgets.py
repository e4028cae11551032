"""`max_bytes` of hooks under several ranks: the bytes of all ranks count, as in a run of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.base import Keeper
from hookrun.actions.rows import TokenRows
from hookrun.ranks.alone import Ranks
from hookrun.runtime.clock import Moment
from hookrun.runtime.records import Budget, first_rows, spent_line
from hookrun.runtime.site import HookSite

Key = tuple[str, str, str, int, int]
"""A firing within a batch, the same on every rank: hook, module, path in the value, call, number within the call."""


@dataclass
class _HeldValue:
    """A captured value that is written or dropped at the end of its batch.

    keep:   writes the value
    places: [rows], the rows of the batch that it holds; None: all
    rows:   the number of rows; None: its first dimension is not that of the batch
    moment: the epoch and step of the capture
    """

    key: Key
    site: HookSite
    keep: Keeper
    value: Any
    places: Tensor | None
    tokens: TokenRows | None
    rows: int | None
    bytes: int
    moment: Moment

    def write(self, count: int | None = None) -> None:
        """Write the value, or its first `count` rows, as if at its firing."""
        value, places, tokens = self.value, self.places, self.tokens
        if count is not None:
            value, places = first_rows(value, places, count)
            tokens = None if tokens is None else tokens.at(torch.arange(count))
        firing = self.site.current
        before = firing.within, firing.of_call
        firing.within, firing.of_call = self.key[2], self.key[3]
        try:
            with self.site.clock.back_at(self.moment):
                self.keep(value, places, tokens)
        finally:
            firing.within, firing.of_call = before


class BudgetsOfRanks:
    """Holds the values that hooks with `max_bytes` capture in a batch, until the sizes of all ranks are known."""

    def __init__(self) -> None:
        self._held = list[_HeldValue]()
        self._of_hooks = dict[str, tuple[HookSite, Budget]]()
        self._counts = Counter[tuple[str, str, str, int]]()

    def add(self, site: HookSite, budget: Budget) -> None:
        """Register a site of a hook with its budget."""
        self._of_hooks.setdefault(site.hook_name, (site, budget))

    def hold(
        self,
        site: HookSite,
        keep: Keeper,
        value: Any,
        places: Tensor | None,
        tokens: TokenRows | None,
        rows: int | None,
        size: int,
    ) -> None:
        """Hold a copy of a captured value, of `size` bytes."""
        place = site.hook_name, site.path, site.current.within, site.call
        self._counts[place] += 1
        key = (*place, self._counts[place])
        self._held.append(_HeldValue(key, site, keep, value, places, tokens, rows, size, site.clock.moment))

    def settle(self, ranks: Ranks, show: Callable[[str], None]) -> None:
        """Write the held values that fit into the budgets, at the end of a batch; every rank calls it.

        show: prints a line
        """
        held, self._held = self._held, []
        self._counts.clear()
        if all(budget.spent for _, budget in self._of_hooks.values()):
            return
        sizes = [
            {_key(line[:5]): (line[5], line[6]) for line in lines}
            for lines in ranks.gathered([[*each.key, each.rows, each.bytes] for each in held])
        ]
        mine = {each.key: each for each in held}
        for key in in_order([list(of_rank) for of_rank in sizes]):
            site, budget = self._of_hooks[key[0]]
            found = [of_rank.get(key, (0, 0)) for of_rank in sizes]
            own = mine.get(key)
            if budget.spent:
                continue
            if budget.takes(sum(size for _, size in found)):
                if own is not None:
                    own.write()
                continue
            budget.spent = True
            count = _fitting(found, budget)[ranks.rank]
            if own is not None and count:
                own.write(count)
            if ranks.is_main:
                show(spent_line(site, budget))
                site.emit({"spent": budget.limit})


def _key(line: Sequence[Any]) -> Key:
    hook, path, within, call, number = line
    return hook, path, within, call, number


def in_order(lists: Sequence[Sequence[Key]]) -> list[Key]:
    """Every key once, in an order that agrees with all lists; a rank's list lacks firings in which it has no row.

    If lists contradict each other, because a model took another path for other rows, the first list decides.
    """
    if all(each == lists[0] for each in lists):  # nearly always: each rank has rows in every firing
        return list(lists[0])
    order = TopologicalSorter[Key]()
    for each in lists:
        for place, key in enumerate(each):
            order.add(key, *each[max(place - 1, 0) : place])
    try:
        return list(order.static_order())
    except CycleError:
        return list(dict.fromkeys(chain(*lists)))


def _fitting(found: Sequence[tuple[int | None, int]], budget: Budget) -> list[int]:
    """How many rows each rank keeps of the firing that exceeds the budget: together, the first rows of the batch."""
    if any(rows is None for rows, _ in found):
        return [0] * len(found)
    counts = [rows or 0 for rows, _ in found]
    row = sum(size for _, size in found) // max(sum(counts), 1)
    left = min((budget.limit - budget.used) // max(row, 1), sum(counts))
    budget.takes(row * left)
    kept = list[int]()
    for count in counts:
        kept.append(min(count, left))
        left -= kept[-1]
    return kept

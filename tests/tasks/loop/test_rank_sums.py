"""Sums and agreements over ranks, on each rank: equal to those of one process that has all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from hookrun.ranks.alone import ALONE, Ranks
from hookrun.runtime import Installation
from hookrun.store.writer import Count
from hookrun.tasks.loop.average import Average
from hookrun.tasks.loop.rank_sums import (
    agreed_stop,
    bytes_of_all,
    counts_of_all,
    draws_of_main,
    effects_of_all,
    summed,
)


class Second(Ranks):
    """Rank 1 of 2; what rank 0 sends is a function of this rank's own values."""

    rank, size, several = 1, 2, True

    def __init__(self, of_main: Callable[[Any], Any]) -> None:
        self._of_main = of_main

    def total(self, values: Sequence[float]) -> list[float]:
        others = self._of_main(list(values))
        return [one + other for one, other in zip(values, others, strict=True)]

    def largest(self, values: Sequence[int]) -> list[int]:
        others = self._of_main(list(values))
        return [max(pair) for pair in zip(values, others, strict=True)]

    def gathered(self, plain: Any) -> list[Any]:
        return [self._of_main(plain), plain]


def site(**more: Any) -> SimpleNamespace:
    keys = SimpleNamespace(when=SimpleNamespace(rank=more.pop("rank", None)))
    batch = SimpleNamespace(batch=more.pop("batch", True))
    return SimpleNamespace(hook_type=batch, spec=SimpleNamespace(keys=keys), **more)


def installed(*sites: SimpleNamespace) -> Installation:
    return cast(Installation, SimpleNamespace(sites=sites))


def test_one_process_keeps_its_own_sums() -> None:
    average, one = Average(), site(changed=1, total=2)
    assert summed(average, Average, ALONE) is average
    assert agreed_stop("why", ALONE) == "rank 0: why" and agreed_stop(None, ALONE) is None
    effects_of_all(installed(one), ALONE)
    assert (one.changed, one.total) == (1, 2)


def test_the_first_rank_with_a_reason_stops_them_all() -> None:
    def reasons(own: Any) -> Any:
        return [1] if own in ([True], [False]) else "NaN in fc"

    assert agreed_stop("NaN in conv", Second(reasons)) == "rank 0: NaN in fc"
    assert agreed_stop(None, Second(reasons)) == "rank 0: NaN in fc"
    alone = Second(lambda own: [0] if isinstance(own, list) else None)
    assert agreed_stop("NaN in conv", alone) == "rank 1: NaN in conv"
    assert agreed_stop(None, alone) is None


def test_effects_are_summed_but_not_those_of_parameters_and_one_rank_s_hooks_fired_as_there() -> None:
    rows, parameter = site(changed=2, total=8), site(batch=False, changed=5, total=5)
    chosen = site(changed=0, total=0, rank=0, fired=0, idle=0)

    def of_main(own: list[float]) -> list[float]:
        return [3, 8, 1, 4] if len(own) == 4 else [7, 1]  # counts of two sites; (fired, idle) of one

    effects_of_all(installed(rows, parameter, chosen), Second(of_main))
    assert [(each.changed, each.total) for each in (rows, parameter, chosen)] == [(5, 16), (5, 5), (1, 4)]
    assert (chosen.fired, chosen.idle) == (7, 1)


def test_draws_continue_from_the_state_of_rank_0() -> None:
    quiet, noise = site(draws=False, draws_place=(1, 1)), site(draws=True, draws_place=(3, 12))
    draws_of_main(installed(quiet, noise), Second(lambda own: [[4, 16]]))
    assert noise.draws_place == (4, 16) and quiet.draws_place == (1, 1)


def test_bytes_of_own_rows_are_summed_and_others_are_the_same_everywhere() -> None:
    counted = Counter({"rows": 10, "weights": 99})
    bytes_of_all(counted, {"rows", "idle"}, Second(lambda own: [0, 6]))  # in the order of their names
    assert counted == {"rows": 16, "weights": 99}, "a hook that counted nothing anywhere stays out"


def test_counts_of_captures_sum_rows_and_bytes_but_not_firings() -> None:
    counts = {("h", "fc"): Count(tensors=3, bytes=30, rows=6)}
    counts_of_all(counts, Second(lambda own: [["h", "fc", 4, 40, 8], ["h", "conv", 1, 5, 2]]))
    assert counts[("h", "fc")] == Count(tensors=4, bytes=70, rows=14)
    assert counts[("h", "conv")] == Count(tensors=1, bytes=5, rows=2)

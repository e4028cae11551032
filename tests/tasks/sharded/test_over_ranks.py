"""Sums, agreements and states over ranks: equal to those of one process that has all rows, or bit by bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hookrun.ranks.alone import ALONE, Ranks
from hookrun.runtime import Installation
from hookrun.store.captures.tensor_file import DTYPES
from hookrun.store.captures.write import Count
from hookrun.store.states.tree import NotPlain
from hookrun.tasks.metrics.average import Average
from hookrun.tasks.metrics.rows import of_samples
from hookrun.tasks.sharded.over_ranks import (
    agreed_stop,
    bytes_of_all,
    counts_of_all,
    draws_of_main,
    effects_of_all,
    for_rank,
    gathered_trees,
    left_out,
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


PLACE = "train.means"


class Of(Ranks):
    """Rank `rank` of `size`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.several = rank, size, size > 1


def average(*losses: float) -> dict[str, Any]:
    found = Average()
    for loss in losses:
        found.add(torch.tensor(loss), of_samples(torch.zeros(1, 2), torch.zeros(1)))
    return found.state_dict()


def hooks(fired: int, changed: int, size: int, texts: list[int]) -> dict[str, Any]:
    site = {"fired": fired, "idle": 0, "changed": changed, "total": 10, "draws": 5}
    sites = {"rows": {"fc": dict(site)}, "weights": {"fc": {**site, "fired": 4}}}
    return {
        "sites": sites,
        "clock": {"step": 4},
        "sink": {
            "bytes": {"rows": size},
            "texts": texts,
            "split": "val",
            "budgets": {"rows": {"used": size, "spent": False}, "weights": {"used": 7, "spent": True}},
        },
    }


def state(rank: int) -> dict[str, Any]:
    """Of a rank of the run that was cut off."""
    return {
        "generators": {"torch": rank},
        "hooks": hooks(fired=4 - rank, changed=3 + rank, size=100 + rank, texts=[7, rank]),
        "sums": {PLACE: average(*[1.0 + rank] * (rank + 1))},
    }


def saved_by(size: int) -> list[dict[str, Any]]:
    """The parts of so many ranks."""
    return [state(rank) for rank in range(size)]


def test_each_of_the_same_number_of_ranks_gets_its_own_part() -> None:
    for rank in range(3):
        assert for_rank(saved_by(3), Of(rank, 3), {"rows"}) == state(rank)
    assert for_rank(saved_by(1), ALONE, {"rows"}) == state(0)


def test_with_another_number_the_sums_and_counts_of_all_are_on_rank_0() -> None:
    for ranks in (ALONE, Of(0, 2)):
        saved = saved_by(3)
        before = copy.deepcopy(saved)
        found = for_rank(saved, ranks, {"rows"})
        assert found["sums"] == {PLACE: average(1.0, 2.0, 2.0, 3.0, 3.0, 3.0)}
        assert found["generators"] == {"torch": 0}
        rows, weights = (found["hooks"]["sites"][name]["fc"] for name in ("rows", "weights"))
        assert rows == {"fired": 4, "idle": 0, "changed": 3 + 4 + 5, "total": 30, "draws": 5}
        assert weights == {"fired": 4, "idle": 0, "changed": 3, "total": 10, "draws": 5}, (
            "the same on each rank"
        )
        assert found["hooks"]["sink"] == {
            "bytes": {"rows": 303},
            "texts": [0, 1, 2, 7],
            "split": "val",
            "budgets": {
                "rows": {"used": 303 // ranks.size, "spent": False},
                "weights": {"used": 7, "spent": True},
            },
        }
        assert found["hooks"]["clock"] == {"step": 4}
        assert saved == before


def test_the_other_ranks_begin_with_empty_sums_so_that_nothing_counts_twice() -> None:
    for size in (1, 3):
        found = for_rank(saved_by(size), Of(1, 2), {"rows"})
        assert "generators" not in found, "the run did not have this rank, or had it among others"
        assert found["sums"] == {PLACE: Average().state_dict()}
        rows, weights = (found["hooks"]["sites"][name]["fc"] for name in ("rows", "weights"))
        assert (rows["changed"], rows["total"], rows["fired"], rows["draws"]) == (0, 0, 4, 5)
        assert (weights["changed"], weights["total"]) == (3, 10)
        assert found["hooks"]["sink"]["bytes"] == {} and found["hooks"]["sink"]["texts"] == sorted(
            {7, *range(size)}
        )


def test_a_hook_whose_ranks_are_all_gone_is_told() -> None:
    chosen = {"first": (0, 2), "last": (2,), "never": (9,)}
    (line,) = left_out(3, Of(0, 2), chosen)
    assert line.startswith("last: ") and "(3 before, 2 now)" in line
    assert left_out(3, Of(0, 3), chosen) == left_out(1, ALONE, chosen) == []


class Both(Ranks):
    """Another rank with the same tree."""

    def gathered(self, plain: Any) -> list[Any]:
        return [plain, plain]


def test_each_dtype_and_shape_is_received_bit_by_bit() -> None:
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 0), (2, 3)):
            tensor = torch.arange(6)[: max(1, torch.Size(shape).numel())].to(dtype)
            tensor = tensor[:0].reshape(shape) if 0 in shape else tensor.reshape(shape)
            for found in gathered_trees(Both(), {"a": [tensor, (1, None)]}):
                assert found["a"][1] == (1, None), dtype
                back = found["a"][0]
                assert (back.dtype, back.shape) == (dtype, tensor.shape)
                assert torch.equal(
                    back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
                ), dtype


def test_tensors_with_other_strides_are_received_equal() -> None:
    value = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    (found, _) = gathered_trees(Both(), value)
    assert torch.equal(found, value) and not found.requires_grad


def test_other_values_are_refused() -> None:
    with pytest.raises(NotPlain):
        gathered_trees(Both(), {"a": object()})

"""What each rank continues from: the same number of ranks bit by bit, another with the sums of all on rank 0."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hookrun.ranks.alone import ALONE, Ranks
from hookrun.tasks.loop.average import Average
from hookrun.tasks.loop.rank_states import for_rank, left_out, with_sums
from hookrun.tasks.loop.rows import of_samples

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
        "sink": {"bytes": {"rows": size}, "texts": texts, "split": "val"},
    }


def state(rank: int) -> dict[str, Any]:
    """Of a rank of the run that was cut off."""
    line = ["stats", {"of": rank}]
    return {
        "generators": {"torch": rank},
        "hooks": hooks(fired=4 - rank, changed=3 + rank, size=100 + rank, texts=[7, rank]),
        "sums": {PLACE: average(*[1.0 + rank] * (rank + 1))},
        "kept": [line],
    }


def tree(size: int) -> dict[str, Any]:
    """A saved state of `size` ranks; one process has these parts at other keys."""
    main = state(0)
    plain = {"generators": main["generators"], "hooks": main["hooks"], "sums": [PLACE]}
    held = {"held": {"train": {"means": main["sums"][PLACE], "epoch": 1}}}
    return {**plain, **held, **({"ranks": [state(rank) for rank in range(size)]} if size > 1 else {})}


def test_each_of_the_same_number_of_ranks_gets_its_own_part() -> None:
    for rank in range(3):
        assert for_rank(tree(3), Of(rank, 3), {"rows"}) == state(rank)
    assert for_rank(tree(1), ALONE, {"rows"}) == {**state(0), "kept": []}


def test_with_another_number_the_sums_counts_and_lines_of_all_are_on_rank_0() -> None:
    for ranks in (ALONE, Of(0, 2)):
        saved = tree(3)
        before = copy.deepcopy(saved)
        found = for_rank(saved, ranks, {"rows"})
        assert found["sums"] == {PLACE: average(1.0, 2.0, 2.0, 3.0, 3.0, 3.0)}
        assert found["kept"] == [["stats", {"of": rank}] for rank in range(3)]
        assert found["generators"] == {"torch": 0}
        rows, weights = (found["hooks"]["sites"][name]["fc"] for name in ("rows", "weights"))
        assert rows == {"fired": 4, "idle": 0, "changed": 3 + 4 + 5, "total": 30, "draws": 5}
        assert weights == {"fired": 4, "idle": 0, "changed": 3, "total": 10, "draws": 5}, (
            "the same on each rank"
        )
        assert found["hooks"]["sink"] == {"bytes": {"rows": 303}, "texts": [0, 1, 2, 7], "split": "val"}
        assert found["hooks"]["clock"] == {"step": 4}
        assert saved == before


def test_the_other_ranks_begin_with_empty_sums_so_that_nothing_counts_twice() -> None:
    for size in (1, 3):
        found = for_rank(tree(size), Of(1, 2), {"rows"})
        assert "generators" not in found, "the run did not have this rank, or had it among others"
        assert found["sums"] == {PLACE: Average().state_dict()} and found["kept"] == []
        rows, weights = (found["hooks"]["sites"][name]["fc"] for name in ("rows", "weights"))
        assert (rows["changed"], rows["total"], rows["fired"], rows["draws"]) == (0, 0, 4, 5)
        assert (weights["changed"], weights["total"]) == (3, 10)
        assert found["hooks"]["sink"]["bytes"] == {} and found["hooks"]["sink"]["texts"] == [7, 0]


def test_a_hook_whose_ranks_are_all_gone_is_told() -> None:
    chosen = {"first": (0, 2), "last": (2,), "never": (9,)}
    (line,) = left_out(tree(3), Of(0, 2), chosen)
    assert line.startswith("last: ") and "(3 before, 2 now)" in line
    assert left_out(tree(3), Of(0, 3), chosen) == left_out(tree(1), ALONE, chosen) == []


def test_sums_are_put_where_they_belong_and_the_state_stays_as_it_was() -> None:
    held = {"train": {"means": 1, "epoch": 2}, "pass": {"average": 3}}
    found = with_sums(held, {"train.means": 10, "pass.average": 30})
    assert found == {"train": {"means": 10, "epoch": 2}, "pass": {"average": 30}}
    assert held == {"train": {"means": 1, "epoch": 2}, "pass": {"average": 3}} and with_sums(held, {}) == held

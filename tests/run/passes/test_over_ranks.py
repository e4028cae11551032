"""The states of several ranks, as another number of ranks continues from them, and what they count together."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from hookrun.run.experiment.metrics.rows import of_samples
from hookrun.run.passes.average import Average
from hookrun.run.passes.over_ranks import effects_of_all, for_rank, left_out
from hookrun.run.ranks import ALONE, Ranks

PLACE = "train.means"


def test_each_of_the_same_number_of_ranks_gets_its_own_part() -> None:
    for rank in range(3):
        assert for_rank(saved_by(3), Of(rank, 3), {"rows"}) == state(rank)
    assert for_rank(saved_by(1), ALONE, {"rows"}) == state(0)


def test_rank_0_has_the_sums_of_another_number_of_ranks() -> None:
    for ranks in (ALONE, Of(0, 2)):
        saved = saved_by(3)
        before = copy.deepcopy(saved)
        found = for_rank(saved, ranks, {"rows"})
        assert found["sums"] == {PLACE: average(1.0, 2.0, 2.0, 3.0, 3.0, 3.0)}
        assert found["generators"] == {"torch": 0}
        rows = found["hooks"]["sites"]["rows"]["fc"]
        weights = found["hooks"]["sites"]["weights"]["fc"]
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


def test_counts_by_step_are_summed_for_another_number_of_ranks() -> None:
    saved = saved_by(2)
    for rank, part in enumerate(saved):
        for of_hook in part["hooks"]["sites"].values():
            of_hook["fc"]["by_step"] = [[0, rank, 5], [10, 1, 5]]
    main = for_rank(saved, ALONE, {"rows"})["hooks"]["sites"]
    assert main["rows"]["fc"]["by_step"] == [[0, 1, 10], [10, 2, 10]]
    assert main["weights"]["fc"]["by_step"] == [[0, 0, 5], [10, 1, 5]], "the same on each rank"
    assert "by_step" not in for_rank(saved, Of(1, 3), {"rows"})["hooks"]["sites"]["rows"]["fc"]


def test_other_ranks_begin_with_empty_sums() -> None:
    for size in (1, 3):
        found = for_rank(saved_by(size), Of(1, 2), {"rows"})
        assert "generators" not in found, "the run did not have this rank, or had it among others"
        assert found["sums"] == {PLACE: Average().state_dict()}
        rows = found["hooks"]["sites"]["rows"]["fc"]
        weights = found["hooks"]["sites"]["weights"]["fc"]
        assert rows["changed"] == 0
        assert rows["total"] == 0
        assert rows["fired"] == 4
        assert rows["draws"] == 5
        assert weights["changed"] == 3
        assert weights["total"] == 10
        assert found["hooks"]["sink"]["bytes"] == {}
        assert found["hooks"]["sink"]["texts"] == sorted({7, *range(size)})


def test_a_hook_that_fired_on_some_rank_did_fire() -> None:
    """Rank 0 has not called the first module, and nothing was found in the second one."""

    class First(Ranks):
        def largest(self, values: Any) -> list[int]:
            return [max(pair) for pair in zip(values, [3, 2, 4, 0], strict=True)]

    kinds: Any = {"hook_type": SimpleNamespace(batch=False)}
    sites = [SimpleNamespace(fired=0, idle=0, **kinds), SimpleNamespace(fired=4, idle=4, **kinds)]
    effects_of_all(SimpleNamespace(sites=sites), First())  # type: ignore[arg-type]
    assert [(site.fired, site.idle) for site in sites] == [(3, 1), (4, 4)]


def test_a_hook_whose_ranks_are_all_gone_is_told() -> None:
    chosen = {"first": (0, 2), "last": (2,), "never": (9,)}
    (line,) = left_out(3, Of(0, 2), chosen)
    assert line.startswith("last: ")
    assert "(3 before, 2 now)" in line
    assert left_out(3, Of(0, 3), chosen) == left_out(1, ALONE, chosen) == []


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

"""Agreement between the processes of one run."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hookrun.cli.ranks import RefusedByMain, agreed, ranks_of, refuse_needs
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.ranks.alone import ALONE
from hookrun.tasks import parse_experiment

SMALL = {"model": {"name": "mlp"}, "data": {"name": "digits"}}


class Two:
    """One of two ranks, with a given answer of the other rank."""

    several = True

    def __init__(self, rank: int, other: list[Any] | None) -> None:
        self.is_main, self._rank, self._other = rank == 0, rank, other

    def gathered(self, mine: Any) -> list[Any]:
        return [mine, self._other] if self._rank == 0 else [self._other, mine]


def test_a_run_without_a_strategy_is_one_process_and_several_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks_of(parse_experiment(SMALL)) as ranks:
        assert ranks is ALONE
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError), ranks_of(parse_experiment(SMALL)):
        pytest.fail("each of two processes would do the whole run")


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_wait_for_each_other_at_their_end_unless_one_failed(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = list[bool]()
    group = SimpleNamespace(failed=failed, meet=lambda: met.append(True), failures_told=nullcontext)
    monkeypatch.setattr("hookrun.ranks.group.joined", lambda *_: nullcontext(group))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    compute = {"strategy": "ddp", "device": "cpu"}
    with ranks_of(parse_experiment({**SMALL, "compute": compute})) as ranks:
        assert ranks is group and not met
    assert met == ([] if failed else [True])


def test_a_failure_on_one_rank_is_raised_by_all_and_reported_once() -> None:
    refusal = SpecError([Problem("a", "is wrong")])
    ranks: Any = Two(0, ["b", 1])
    with pytest.raises(SpecError), agreed(ranks):
        raise refusal
    with pytest.raises(HookrunError, match="rank 1 cannot run the experiment") as told, agreed(ranks):
        pass
    assert "\nb" in str(told.value)
    ranks = Two(1, [str(refusal), 2])
    with pytest.raises(RefusedByMain) as silent, agreed(ranks):
        pass
    assert silent.value.exit_code == 2
    ranks = Two(1, None)
    with agreed(ranks):
        pass
    with agreed(ALONE), pytest.raises(SpecError):
        refuse_needs(missing=True)
    refuse_needs(missing=False)

"""A region that activation checkpointing repeats is distinguished from its first run, in both modes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hookrun.runtime.checkpointing import Call, Log, may_be_checkpointed, regions, repeating


def test_the_first_run_and_the_repetition_have_the_same_region() -> None:
    for reentrant in (False, True):
        first, repeated = list[object](), list[object]()

        def region(
            x: Tensor,
            reentrant: bool = reentrant,
            first: list[object] = first,
            repeated: list[object] = repeated,
        ) -> Tensor:
            assert may_be_checkpointed()
            around, again = regions(), repeating()
            if again is None:
                first.extend(around.first)
            else:
                assert again.keeps_graph is not reentrant
                repeated.append(again.repeated)
            return x.sin()

        x = torch.ones(2, requires_grad=True)
        checkpoint(region, x, use_reentrant=reentrant).sum().backward()
        assert len(first) == len(repeated) == 1 and first[0] is repeated[0], reentrant


def test_without_a_checkpoint_there_is_no_region() -> None:
    assert regions().first == () and regions().repeated is None and repeating() is None
    assert not may_be_checkpointed()


def test_a_log_repeats_the_calls_in_their_order_and_no_others() -> None:
    log, calls = Log(), [Call(0, 4, None, Counter({1: 2})), Call(1, 5, None, Counter())]
    for call in calls:
        log.append(call)
    repeated = [log.repeat() for _ in range(3)]
    assert repeated == [calls[0]._replace(drawn=Counter()), calls[1], None]  # each draws its numbers again

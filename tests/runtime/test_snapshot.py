"""A snapshot keeps a value as it is, while the original is written to later."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hookrun.runtime.snapshot import Uncopyable, held, opened, snapshot


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: Any


def test_later_writes_are_not_seen_and_shared_memory_stays_shared() -> None:
    x = torch.ones(2, requires_grad=True)
    whole = Output(x * 2, {"list": [x, deque([x], maxlen=3)], "bytes": bytearray(b"a"), "n": 3})
    found = snapshot(whole)
    with torch.no_grad():
        x.zero_(), whole.logits.zero_()
    whole.extra["list"].append(1)
    whole.extra["bytes"][0] = 0
    assert type(found) is Output and found.logits.tolist() == [2, 2] and not found.logits.requires_grad
    first, queue = found.extra["list"]
    assert first.tolist() == [1, 1] and queue[0] is first and queue.maxlen == 3
    assert found.extra["bytes"] == b"a" and found.extra["n"] == 3
    assert [each.data_ptr() for each in held(whole)] == [whole.logits.data_ptr(), x.data_ptr(), x.data_ptr()]
    assert opened(found)["extra"]["list"][1] == {0: first}


def test_an_object_that_may_change_is_refused_with_a_target_to_use_instead() -> None:
    class Own:
        def __init__(self) -> None:
            self.hidden = torch.ones(1)

    with pytest.raises(Uncopyable, match=r"cannot copy the Own at '\[1\]', .*target: \[1\]\.hidden"):
        snapshot((1, Own()))
    with pytest.raises(Uncopyable, match="cannot copy the Linear"):
        snapshot([torch.nn.Linear(1, 1)])

"""A captured value stays what it was, whoever writes to the tensor later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hookrun.engine.runtime import fast
from hookrun.engine.runtime.fast.copies import OF_GRADIENT, UNSHARED, KeptInMemory, held_bytes
from hookrun.engine.runtime.snapshot import append_copy


@pytest.mark.parametrize("way", ["any", "new", "gradient"])
def test_a_kept_value_does_not_change_with_later_writes(way: str) -> None:
    values = list[torch.Tensor]()
    site = SimpleNamespace(fired=0)
    others = list[torch.Tensor]()
    kept = KeptInMemory(values, append_copy)

    def otherwise(value: torch.Tensor) -> torch.Tensor:
        others.append(value)
        kept(value)
        return value

    references = OF_GRADIENT if way == "gradient" else UNSHARED
    keep = kept.observer(cast(Any, site), otherwise, references=references, new=way == "new")
    base = torch.zeros(4)
    array = np.zeros(2, np.float32)
    given = [torch.zeros(2), torch.zeros(2), base[:2], torch.from_numpy(array), torch.zeros(2)]
    given.append(torch.zeros(2, requires_grad=True) * 1)
    given.append(torch.from_dlpack(torch.zeros(2).__dlpack__()))
    for each in given:
        assert keep(each) is each
        with torch.no_grad():
            each.add_(1)
    base.add_(1)
    array += 1
    assert torch.is_grad_enabled()
    for each in values:
        assert not (each.any())
        assert not (each.requires_grad)
    assert site.fired + len(others) == len(values) == len(given)
    assert (site.fired > 1) == (fast.IS_ON and way != "gradient"), "which has one reference more"


def test_bytes_of_a_sparse_tensor_are_those_of_its_parts() -> None:
    assert held_bytes(torch.eye(3).to_sparse()) == 3 * 4 + 2 * 3 * 8

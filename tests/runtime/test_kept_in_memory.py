"""A captured value stays what it was, whoever writes to the tensor later."""

from __future__ import annotations

import numpy as np
import torch

from hookrun.runtime.kept_in_memory import KeptInMemory


def test_a_kept_value_is_what_it_was_whatever_is_written_later() -> None:
    for way in ("keep", "keep_new", "keep_gradient"):
        values = list[torch.Tensor]()
        keep = getattr(KeptInMemory(values), way)
        base, array = torch.zeros(4), np.zeros(2, np.float32)
        given = [torch.zeros(2), torch.zeros(2), base[:2], torch.from_numpy(array), torch.zeros(2)]
        given.append(torch.zeros(2, requires_grad=True) * 1)
        for each in given:
            keep(each)
            with torch.no_grad():
                each.add_(1)
        base.add_(1)
        array += 1
        assert len(values) == len(given), way
        assert not any(each.any() or each.requires_grad for each in values), way


def test_members_of_containers_are_kept_too() -> None:
    values = list[dict[str, torch.Tensor]]()
    given = {"a": torch.zeros(2)}
    KeptInMemory(values)(given)
    given["a"].add_(1)
    assert values[0]["a"].tolist() == [0, 0]

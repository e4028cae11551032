"""Trees with tensors are sent unchanged from each rank to all others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hookrun.ranks.alone import Ranks
from hookrun.store.rank_trees import gathered_trees
from hookrun.store.tensor_file import DTYPES
from hookrun.store.tree import NotPlain


class Two(Ranks):
    """Another rank with the same tree; what is exchanged passes through JSON."""

    def gathered(self, plain: Any) -> list[Any]:
        return [json.loads(json.dumps(plain)), json.loads(json.dumps(plain))]


def test_each_dtype_and_shape_is_received_bit_by_bit() -> None:
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 0), (2, 3)):
            tensor = torch.arange(6)[: max(1, torch.Size(shape).numel())].to(dtype)
            tensor = tensor[:0].reshape(shape) if 0 in shape else tensor.reshape(shape)
            for found in gathered_trees(Two(), {"a": [tensor, (1, None)]}):
                assert found["a"][1] == (1, None), dtype
                back = found["a"][0]
                assert (back.dtype, back.shape) == (dtype, tensor.shape)
                assert torch.equal(
                    back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
                ), dtype


def test_tensors_with_other_strides_are_received_equal() -> None:
    value = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    (found, _) = gathered_trees(Two(), value)
    assert torch.equal(found, value) and not found.requires_grad


def test_other_values_are_refused() -> None:
    with pytest.raises(NotPlain):
        gathered_trees(Two(), {"a": object()})

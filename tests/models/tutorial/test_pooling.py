"""The numbers of the tutorials, by hand-written hooks: adaptive pooling, row 10."""

from __future__ import annotations

import torch
from tutorial_models import model_of


def test_pooling_returns_eight_channels_of_4x4() -> None:
    model, seen = model_of("pooling", shape=(3, 10, 10)), []
    model.pool.register_forward_hook(lambda _m, _args, output: seen.append(list(output.shape)))
    assert model(torch.randn(1, 3, 10, 10)).shape == (1, 1)
    assert seen == [[1, 8, 4, 4]]

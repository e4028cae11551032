"""Random tensors for tests."""

from __future__ import annotations

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

"""Sets torch's number of threads and its gradient mode within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def threads(count: int, *, grad: bool = True) -> Iterator[None]:
    """Use `count` threads inside the block: with tiny layers more threads only add noise.

    grad: whether autograd is enabled inside the block
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.set_grad_enabled(grad):
            yield
    finally:
        torch.set_num_threads(before)

"""How many threads torch uses, and whether it records gradients, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def threads(count: int, *, grad: bool = True) -> Iterator[None]:
    """At most so many threads: where layers are tiny, more only add noise."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.set_grad_enabled(grad):
            yield
    finally:
        torch.set_num_threads(before)

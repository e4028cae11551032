"""The rank of this process in whatever distributed run it belongs to."""

from __future__ import annotations


def own_rank() -> int:
    """The rank of this process in a distributed run of hookrun or the user; 0 otherwise."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0

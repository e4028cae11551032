"""How torchrun started this process: its rank among how many. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hookrun.errors import Problem, SpecError

WHERE = "compute.strategy"


@dataclass(frozen=True)
class Started:
    """The position of this process in a run of several.

    rank:  its rank, from 0
    size:  number of processes
    local: its rank among the processes of its machine, which selects its accelerator
    """

    rank: int
    size: int
    local: int


def started() -> Started | None:
    """The rank from torchrun's environment variables; None if torchrun did not start this process.

    Raises SpecError if the environment names several processes but not the rank of this one.
    """
    size = _number("WORLD_SIZE")
    if size is None:
        return None
    rank, local = _number("RANK"), _number("LOCAL_RANK")
    if rank is None and size > 1:
        what = f"the environment names {size} processes (WORLD_SIZE) and no rank of this one (RANK)"
        raise SpecError([Problem(WHERE, what, "start it by torchrun, which sets both")])
    if rank is None or not os.environ.get("MASTER_ADDR"):
        return None
    return Started(rank, size, rank if local is None else local)


def size_of_world() -> int:
    """The number of processes according to the environment; 1 without torchrun."""
    return _number("WORLD_SIZE") or 1


def is_main() -> bool:
    """Whether this process prints: it is the only one, or rank 0."""
    return not _number("RANK") or size_of_world() == 1


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None

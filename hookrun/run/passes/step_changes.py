"""How many elements the edits of hooks change on the logged steps of a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values.tensors import read_together

MOST_STEPS = 100
"""Steps of which the changes are kept; of more, evenly spaced ones."""

MOST_COUNTS = 50_000
"""The same for all sites together: with many sites, fewer steps of each are kept."""


@contextmanager
def noting_changes(sites: Sequence[HookSite], step: int, every: int) -> Iterator[None]:
    """Note in `by_step` of each site how many elements its edits change in the block, which is one logged step.

    The counts are read together at the end of the block, where the host has waited for the loss of the step. Which
    steps are kept depends on their numbers alone, so that a resumed run keeps the same ones.

    every: a step is logged after so many
    """
    apart = every * _stride(step // every, len(sites))
    if step % apart:
        yield
        return
    before = [(site.changed, site.total) for site in sites]
    yield
    acted: list[tuple[HookSite, int]] = []
    changes: list[Tensor] = []
    for site, (changed, total) in zip(sites, before, strict=True):
        if site.total > total:
            acted.append((site, site.total - total))
            changes.append(torch.as_tensor(site.changed - changed))
    for (site, total), change in zip(acted, read_together(changes), strict=True):
        kept = [line for line in site.by_step if line[0] % apart == 0]
        site.by_step = [*kept, [step, int(change), total]]


def _stride(number: int, sites: int) -> int:
    """Of the logged steps up to this number, one in so many is kept: a power of 2."""
    most = max(2, min(MOST_STEPS, MOST_COUNTS // max(sites, 1)))
    return 1 << (number // most).bit_length()


def summed(of_ranks: Iterable[Iterable[Sequence[int]]]) -> list[list[int]]:
    """The `by_step` of all ranks as one: what each step changed on all of them."""
    changed = Counter[int]()
    total = Counter[int]()
    for step, *counts in chain.from_iterable(of_ranks):
        changed[step] += counts[0]
        total[step] += counts[1]
    return [[step, changed[step], total[step]] for step in sorted(total)]

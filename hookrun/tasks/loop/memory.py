"""How much memory an analysis of captures takes, judged before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hookrun.errors import Problem
from hookrun.plan.table import size
from hookrun.tasks.loop.features import BYTES, READING, Features

SHARE = 8
"""A block that is read at once takes this part of the allowed memory, where a row is not larger."""

SUGGESTED = 4096
"""Features that a refusal suggests to project to."""


def reading_bytes(features: Sequence[Features]) -> int:
    """For the blocks on their way from the disk, and for a projection."""
    blocks = max(each.rows_at_once * each.captured * BYTES for each in features)
    sketch = max(2 * BYTES * each.captured if each.projection is not None else 0 for each in features)
    return READING * blocks + sketch


def too_large(
    what: str, features: Features, needed: int, allowed: int, projected: Callable[[int], int]
) -> Problem:
    """The problem of an analysis that does not fit.

    what:      is done
    features:  of the module that takes the most
    needed:    bytes
    projected: the bytes that it takes after a projection to so many features
    """
    shape = list(features.capture.shape[1:])
    text = (
        f"{what} would take about {size(needed)} of memory, and {size(allowed)} are allowed: "
        f"{features.name} has {len(features):,} rows of {shape}"
    )
    steps = [f"allow more (task.max_bytes={_rounded(needed)})"]
    if features.captured > SUGGESTED and (less := projected(SUGGESTED)) <= allowed:
        steps.append(
            f"project at random to fewer features (task.project={SUGGESTED}, which takes {size(less)})"
        )
    steps.append("capture fewer samples (train.limit_batches, or the hook's keep) or less of each (reduce)")
    return Problem("task.max_bytes", text, ", ".join(steps[:-1]) + f", or {steps[-1]}")


def _rounded(needed: int) -> int:
    """Up to whole 100 MB."""
    return -(-needed // 10**8) * 10**8

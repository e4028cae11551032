"""The memory that an analysis of captures needs, estimated before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hookrun.errors import Problem
from hookrun.plan.table import size
from hookrun.tasks.loop.features import BYTES, READING, Features

SHARE = 8
"""A block that is read at once takes at most 1/SHARE of the allowed memory, or one row."""

SUGGESTED = 4096
"""The number of features that the error message suggests for a projection."""


def reading_bytes(features: Sequence[Features]) -> int:
    """The bytes needed to read blocks of rows and project them."""
    blocks = max(each.rows_at_once * each.captured * BYTES for each in features)
    sketch = max(2 * BYTES * each.captured if each.projection is not None else 0 for each in features)
    return READING * blocks + sketch


def too_large(
    what: str, features: Features, needed: int, allowed: int, projected: Callable[[int], int]
) -> Problem:
    """The problem of an analysis that needs more memory than allowed.

    what:      the analysis, as the subject of the message
    features:  those of the module that needs the most memory
    needed:    the bytes that it needs
    allowed:   the bytes that it may use
    projected: number of features -> the bytes that it needs after a projection to them
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
    """Bytes rounded up to a multiple of 100 MB."""
    return -(-needed // 10**8) * 10**8

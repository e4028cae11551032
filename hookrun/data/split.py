"""The fixed split of one set of samples into train and val, independent of the experiment's seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# NumPy's policy (NEP 19) fixes RandomState's stream, so the parts never change. They must not follow the
# experiment's seed: a checkpoint evaluated under another seed would be tested on samples it was trained on.
_SEED = 0


def val_count(total: int, fraction: float) -> int:
    """How many of `total` samples are for validation; each part gets at least one, unless fraction is 0 or 1."""
    count = round(total * fraction)
    return min(max(count, 1), total - 1) if 0 < fraction < 1 and total > 1 else count


def split_indices(total: int, fraction: float) -> tuple[list[int], list[int]]:
    """The train and the validation indices of `total` samples, drawn at random, each in ascending order."""
    order = np.random.RandomState(_SEED).permutation(total)
    count = val_count(total, fraction)
    return sorted(order[count:].tolist()), sorted(order[:count].tolist())


def stratified_indices(labels: Sequence[int], fraction: float) -> tuple[list[int], list[int]]:
    """As `split_indices`, with the fraction taken of each class separately."""
    groups: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    train: list[int] = []
    val: list[int] = []
    for members in groups.values():
        kept, held_out = split_indices(len(members), fraction)
        train += [members[i] for i in kept]
        val += [members[i] for i in held_out]
    return sorted(train), sorted(val)


def part_of(total: int, fraction: float, *, val: bool) -> Sequence[int]:
    """The indices of one part of `total` samples; in order if the part has all of them."""
    count = val_count(total, fraction)
    if count in (0, total):
        return range(total if val == (count > 0) else 0)
    train, held_out = split_indices(total, fraction)
    return held_out if val else train

"""Less work for the garbage collector: what imports made is set aside, and nobody counts how much that is."""

from __future__ import annotations

import gc

_freeze, _unfreeze = gc.freeze, gc.unfreeze


def _counting(count: int) -> None:
    # Python's own function goes through all objects that were set aside, which takes 40 ms in each command.
    gc.get_freeze_count = lambda: count


def _frozen() -> None:
    _freeze()
    _counting(1)


def _unfrozen() -> None:
    _unfreeze()
    _counting(0)


def quick_collector() -> None:
    """Collect less often; `gc.get_freeze_count` returns from now on 1 or 0: whether objects are set aside."""
    gc.set_threshold(10_000, 20, 50)
    gc.freeze, gc.unfreeze = _frozen, _unfrozen
    _counting(int(gc.get_freeze_count() > 0))

"""The results of an analysis, saved part by part, so that a resumed run does not compute a part again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hookrun.store.states import SECONDS

SHARE = 10
"""Saving takes at most 1/SHARE of the time, unless it is cheap."""

CHEAP = 0.1
"""A save that takes less than this many seconds is always made."""


class Results:
    """The parts by name, as plain values and tensors.

    found: the parts of an earlier process of the run, whose lines are in metrics.jsonl already
    save:  writes a resumable state with the parts; None: no state is written
    """

    def __init__(
        self, found: Mapping[str, Any] | None = None, save: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._found = dict(found or {})
        self._save = save
        self._saved = time.monotonic()
        self._cost = 0.0

    def get(self, name: str) -> Any:
        """The part; None if it has not been computed yet."""
        return self._found.get(name)

    def add(self, name: str, part: Any, *, is_whole: bool = True) -> None:
        """Add a part, after its lines were written to metrics.jsonl, and save unless that would take too much time.

        is_whole: False for an intermediate result, which is saved only at regular intervals
        """
        self._found[name] = part
        start = time.monotonic()
        seconds = start - self._saved
        is_cheap = self._cost < CHEAP or seconds >= SHARE * self._cost
        if self._save is None or not (seconds >= SECONDS or (is_whole and is_cheap)):
            return
        self._save(self._found)
        self._saved = time.monotonic()
        self._cost = self._saved - start

"""What an analysis has found, part by part, so that a run that goes on computes no part again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hookrun.store.states import SECONDS

SHARE = 10
"""States that are not cheap take at most one part in so many of the time."""

CHEAP = 0.1
"""Seconds that saving may take at any time."""


class Results:
    """The parts by name, plain values and tensors.

    found: what an earlier process had found, whose lines are in metrics.jsonl
    save:  writes a resumable state that holds the parts; None: no state is written
    """

    def __init__(
        self, found: Mapping[str, Any] | None = None, save: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._found = dict(found or {})
        self._save = save
        self._saved = time.monotonic()
        self._cost = 0.0

    def get(self, name: str) -> Any:
        """The part; None where it is still to be found."""
        return self._found.get(name)

    def add(self, name: str, part: Any, *, is_whole: bool = True) -> None:
        """A part was found, its lines of metrics.jsonl are written: save it, unless that would take much of the time.

        is_whole: False: it is a step on the way to one, and waits until a state is due anyway
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

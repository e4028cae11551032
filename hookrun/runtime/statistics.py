"""The records of `stats`: computed by a compiled function if possible; else small tensors together, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.actions.base import RECORD_KEYS
from hookrun.kernels.statistics import Measure, measuring
from hookrun.runtime.small_tensors import SmallTensors, Waiting

_dispatch_modes = torch._C._len_torch_dispatch_stack


class Statistics:
    """Computes the statistics of tensors at once, or keeps copies until `measure` is called."""

    def __init__(self) -> None:
        self._small = SmallTensors()
        self._measures = dict[tuple[str, ...], Measure | None]()

    def add(self, x: Tensor, of: tuple[str, ...], start: tuple[Any, ...]) -> Waiting | None:
        """A record that is complete after `measure` at the latest. None: the caller has to compute the statistics.

        of:    the statistics for the record
        start: the values of RECORD_KEYS, with which the record begins
        """
        if of not in self._measures:
            self._measures[of] = measuring(of)
        measure = self._measures[of]
        if measure is not None and not _dispatch_modes() and (found := measure(x)) is not None:
            return [dict(zip((*RECORD_KEYS, *of), start + found, strict=True))]
        return self._small.add(x, of, start)

    def measure(self) -> None:
        """Complete all records that wait for their statistics."""
        self._small.measure()

"""The records of `stats`: by a compiled function where there is one, else small tensors together, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookrun.actions.base import RECORD_KEYS
from hookrun.kernels.statistics import Measure, measuring
from hookrun.runtime.small_tensors import SmallTensors, Waiting

_dispatch_modes = torch._C._len_torch_dispatch_stack


class Statistics:
    """Finds the statistics of tensors at once, or keeps copies of them until `measure` is called."""

    def __init__(self) -> None:
        self._small = SmallTensors()
        self._measures = dict[tuple[str, ...], Measure | None]()

    def add(self, x: Tensor, of: tuple[str, ...], start: tuple[Any, ...]) -> Waiting | None:
        """A record that has its statistics after `measure` at the latest. None: somebody else has to compute them.

        of:    which statistics its record is to have
        start: the values of RECORD_KEYS, with which the record begins
        """
        if of not in self._measures:
            self._measures[of] = measuring(of)
        measure = self._measures[of]
        if measure is not None and not _dispatch_modes() and (found := measure(x)) is not None:
            return [dict(zip((*RECORD_KEYS, *of), start + found, strict=True))]
        return self._small.add(x, of, start)

    def measure(self) -> None:
        """Complete every record that waits for its statistics."""
        self._small.measure()

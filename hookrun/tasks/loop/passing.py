"""A pass over batches that can be resumed: its progress, and when its state is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hookrun.store.run_dir import RunDir
from hookrun.store.states import SECONDS
from hookrun.tasks.loop.average import Average
from hookrun.tasks.loop.resuming import Resuming


class Resumable(Protocol):
    """An object with sums over batches, which can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Its state between two batches, as plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace its state by a saved one."""


@dataclass
class PartialPass:
    """The progress of a pass.

    step:    the step of the hooks' clock before the pass; during the pass the clock counts batches from 0
    holding: the objects with sums over batches, by name
    batches: the number of finished batches
    """

    step: int
    holding: Mapping[str, Resumable] = field(default_factory=dict)
    batches: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The progress with the states of the sums, as plain values and tensors."""
        sums = {name: each.state_dict() for name, each in self.holding.items()}
        return {"step": self.step, "batches": self.batches, "holding": sums}

    def sums(self) -> dict[str, Average]:
        """Key path in the state -> the sums over the rows of this rank only."""
        return {f"holding.{name}": each for name, each in self.holding.items() if isinstance(each, Average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the progress by a saved one."""
        self.step, self.batches = state["step"], state["batches"]
        for name, each in self.holding.items():
            each.load_state_dict(state["holding"][name])


class DurableRows:
    """Decides when to save a state in a task without training: when captured rows have been written to disk.

    Then these rows are not computed again. Saving writes buffered rows too, so that indexes and the state agree.
    """

    def __init__(self, run_dir: RunDir, resuming: Resuming) -> None:
        self._run_dir, self._resuming = run_dir, resuming
        self._shards = run_dir.shards

    def point(self) -> None:
        """Call it after each batch; saves a state if one is due."""
        due = self._run_dir.shards != self._shards or self._resuming.seconds >= SECONDS
        if self._resuming.point(due):
            self._shards = self._run_dir.shards

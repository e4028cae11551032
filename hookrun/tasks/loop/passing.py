"""A pass over batches that may go on in its middle: what is behind of it, and when a state of it is due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hookrun.store.run_dir import RunDir
from hookrun.store.states import SECONDS
from hookrun.tasks.loop.average import Average
from hookrun.tasks.loop.resuming import Resuming


class Holding(Protocol):
    """Something that adds up from batch to batch."""

    def state_dict(self) -> dict[str, Any]:
        """What it holds between two batches, as plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


@dataclass
class PartialPass:
    """What is behind of a pass.

    step:    of the hooks' clock before the pass, which counts batches from 0 in it
    holding: what adds up from batch to batch, by name
    batches: how many are behind
    """

    step: int
    holding: Mapping[str, Holding] = field(default_factory=dict)
    batches: int = 0

    def state_dict(self) -> dict[str, Any]:
        """What it goes on from, with what adds up."""
        sums = {name: each.state_dict() for name, each in self.holding.items()}
        return {"step": self.step, "batches": self.batches, "holding": sums}

    def sums(self) -> dict[str, Average]:
        """What is added up of it over the rows of this rank alone, by its place in the state."""
        return {f"holding.{name}": each for name, each in self.holding.items() if isinstance(each, Average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.step, self.batches = state["step"], state["batches"]
        for name, each in self.holding.items():
            each.load_state_dict(state["holding"][name])


class DurableRows:
    """When a state is due in a task that trains nothing: as soon as rows are on the disk, which are not computed again.

    A state writes what is buffered too, so that what the indexes name and what the newest state names are the same.
    """

    def __init__(self, run_dir: RunDir, resuming: Resuming) -> None:
        self._run_dir, self._resuming = run_dir, resuming
        self._shards = run_dir.shards

    def point(self) -> None:
        """A batch is over."""
        due = self._run_dir.shards != self._shards or self._resuming.seconds >= SECONDS
        if self._resuming.point(due):
            self._shards = self._run_dir.shards

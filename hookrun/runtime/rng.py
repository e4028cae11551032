"""The random numbers of one hook at one module: the same in every run, and in a recomputed call."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from threading import get_ident

import torch
from torch import Generator

from hookrun.runtime.clock import Calls


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Draws:
    """Random draws, each with its own seed, numbered so that recomputation by activation checkpointing repeats them.

    seed:  of the hook at this module
    calls: numbers the module's calls, if recomputed calls must repeat their draws; else None
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls: Calls | None = None
        self._count = 0
        self._chances = 0
        self._generators = dict[tuple[int, torch.device], Generator]()

    def generator(self, device: torch.device) -> Generator:
        """A generator with the seed of the next draw; each thread has its own."""
        key = get_ident(), device
        if (found := self._generators.get(key)) is None:
            found = self._generators[key] = Generator(device)
        found.manual_seed(derived_seed(self.seed, *self._next()))
        return found

    def chance(self, seed: int) -> float:
        """A number in [0, 1) for the firing that begins; the same when its call is recomputed."""
        if self.calls is not None:
            number = self.calls.now.total
        else:
            self._chances += 1
            number = self._chances
        return derived_seed(seed, self.seed, number) / 2**63

    def state_dict(self) -> dict[str, int]:
        """How many draws were made that are not numbered by calls of the module."""
        return {"draws": self._count, "chances": self._chances}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the next draw after a `state_dict`."""
        self._count, self._chances = state["draws"], state["chances"]

    def _next(self) -> tuple[int, ...]:
        """The number of the draw: (module call, n-th draw in it), or (n-th draw of all,)."""
        if self.calls is None:
            self._count += 1
            return (self._count,)
        run = self.calls.run
        run.drawn[self.seed] += 1
        return run.call.total, run.drawn[self.seed]

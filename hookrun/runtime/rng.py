"""The random numbers of one hook at one module: the same in every run, and again where a call is repeated."""

from __future__ import annotations

import hashlib
from threading import get_ident

import torch
from torch import Generator

from hookrun.runtime.clock import Calls


def derived_seed(*parts: object) -> int:
    """A seed that depends on every part, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Draws:
    """Draws, each from a seed of its own, numbered so that activation checkpointing repeats them.

    seed:  of the hook at this module
    calls: of the module, where the draws of a call have to be found again; else None
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls: Calls | None = None
        self._count = 0
        self._chances = 0
        self._generators = dict[tuple[int, torch.device], Generator]()

    def generator(self, device: torch.device) -> Generator:
        """A generator seeded for this draw alone; each thread has its own."""
        key = get_ident(), device
        if (found := self._generators.get(key)) is None:
            found = self._generators[key] = Generator(device)
        found.manual_seed(derived_seed(self.seed, *self._next()))
        return found

    def chance(self, seed: int) -> float:
        """A number from 0 to 1, 1 excluded, for the firing that begins; the same where its call is repeated."""
        if self.calls is not None:
            number = self.calls.now.total
        else:
            self._chances += 1
            number = self._chances
        return derived_seed(seed, self.seed, number) / 2**63

    @property
    def place(self) -> tuple[int, int]:
        """How many draws and chances there have been, those numbered by a call not counted."""
        return self._count, self._chances

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._count, self._chances = place

    def _next(self) -> tuple[int, ...]:
        """Which draw it is: the n-th of a call of the module, or the n-th of all."""
        if self.calls is None:
            self._count += 1
            return (self._count,)
        run = self.calls.run
        run.drawn[self.seed] += 1
        return run.call.total, run.drawn[self.seed]

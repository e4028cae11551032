"""The random numbers of a hook, the same in every run and in a recomputed call, and the samples that it keeps."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

import numpy as np
import torch
from torch import Generator, Tensor
from torch._prims_common import suggest_memory_format

from hookrun.engine.actions.fields import Keep
from hookrun.engine.runtime.call_stack import Calls
from hookrun.engine.runtime.clock import Clock, RowsOfRank
from hookrun.engine.values.tensors import holds_data
from hookrun.errors import HookError


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states of the generators of torch (CPU), NumPy and Python afterwards."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(eq=False)
class Draws:
    """Random draws, each with its own seed, numbered so that recomputation by activation checkpointing repeats them.

    seed:  of the hook at this module
    calls: numbers the module's calls, if recomputed calls must repeat their draws; else None
    """

    seed: int
    calls: Calls | None = None
    _count: int = 0
    _chances: int = 0
    _generators: dict[tuple[int, torch.device], Generator] = field(default_factory=dict)

    def generator(self, device: torch.device) -> Generator:
        """A generator with the seed of the next draw; each thread has its own."""
        key = get_ident(), device
        if key not in self._generators:
            self._generators[key] = Generator(device)
        return self._generators[key].manual_seed(derived_seed(self.seed, *self.next()))

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
        self._count = state["draws"]
        self._chances = state["chances"]

    def next(self) -> tuple[int, ...]:
        """The number of the draw: (module call, n-th draw in it), or (n-th draw of all,)."""
        if self.calls is None:
            self._count += 1
            return (self._count,)
        call = self.calls.now
        call.drawn[self.seed] += 1
        return call.total, call.drawn[self.seed]


Fill = Callable[[Tensor, Generator], Tensor]
"""Fills a tensor in place from a generator, and returns it."""


def drawn(
    like: Tensor, fill: Fill, generator: Generator, rows: RowsOfRank | None, dim: int | None = 0
) -> Tensor:
    """A tensor of the shape, dtype and device of `like`, filled from the generator.

    rows: which rows of the batch `like` has. Numbers are drawn for all rows of the batch, as in a single process, and
          this rank's rows are returned, so that a sample's numbers do not depend on the number of ranks. None: `like`
          has the whole batch
    dim:  the dimension of `like` that is the batch; None: it has none

    Raises ValueError if the number of rows of `like` is another one, or torch is too old to trace the draw.
    """
    if rows is None:
        try:
            return fill(torch.empty_like(like), generator)
        except NotImplementedError as error:
            if "torch._C.Generator" not in str(error):
                raise
            raise ValueError(
                "torch.export and make_fx trace random numbers of a generator from torch 2.13 on"
            ) from error
    if dim is None or dim >= like.dim() or like.shape[dim] != len(rows.mine):
        raise ValueError(
            f"this rank has {len(rows.mine)} rows of the batch, the tensor has shape {list(like.shape)}"
        )
    sizes = list(like.shape)
    sizes[dim] = rows.whole
    empty = torch.empty(
        sizes, dtype=like.dtype, device=like.device, memory_format=suggest_memory_format(like)
    )
    whole = fill(empty, generator)
    return whole.narrow(dim, rows.mine.start, len(rows.mine))


def kept_samples(keep: Keep, clock: Clock, seed: int, where: str) -> Callable[[], Tensor]:
    """A function that returns which samples of the current batch are kept, [B] bool.

    They are every n-th sample (`every`), or k samples drawn uniformly without replacement beforehand (`reservoir`).
    The function raises HookError if it is not known which samples these are, or how many there are.

    where: the hook and its module, for messages
    """
    drawn_of: dict[int, Tensor] = {}  # by population

    def error(what: str) -> HookError:
        return HookError(f"{where}: it keeps only some samples and does not know {what}")

    def is_kept() -> Tensor:
        samples = clock.samples
        population = clock.population
        if samples is None:
            raise error("which samples these are: set hooks.samples before each batch")
        if keep.every is not None:
            return samples % keep.every == 0
        if population is None:
            raise error("how many there are: set hooks.population to the number of samples")
        chosen = drawn_of.get(population)
        if chosen is None:
            order = torch.randperm(population, generator=Generator().manual_seed(seed))
            chosen = torch.zeros(population, dtype=torch.bool)
            chosen.index_fill_(0, order[: keep.reservoir], True)
            if holds_data(chosen):
                drawn_of[population] = chosen
        try:
            return chosen[samples]
        except IndexError:
            which = f"sample {int(samples.max())}: hooks.population is {population}"
            raise error(f"{which}, set it to the number of samples") from None

    return is_kept

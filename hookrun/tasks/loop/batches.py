"""Batches of a split in a repeatable order, each with the ids of its samples, on the device of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, default_collate

from hookrun import data
from hookrun.data import Split
from hookrun.data.samples import IGNORED, Samples, TensorSamples
from hookrun.interruptions import left_to_main
from hookrun.ranks.alone import ALONE, Ranks
from hookrun.runtime.rng import derived_seed
from hookrun.spec import Settings
from hookrun.spec.experiment import Data
from hookrun.tasks.loop.generators import all_seeded, seeded
from hookrun.tasks.loop.prepared import Prepared
from hookrun.tasks.loop.rank_rows import RankRows, without_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one split.

    ids:        [B] int64 on the CPU, out of `population`
    inputs:     a tensor [B, ...] or several by name
    target:     [B, ...]
    data:       the samples that the batch is of
    whole:      how many rows it has on all ranks together
    pattern:    where this rank has no row of it, one of another rank's: for passes in which every rank takes part
    """

    ids: Tensor
    inputs: Tensor | dict[str, Tensor]
    target: Tensor
    population: int
    split: Split
    data: Samples
    whole: int
    pattern: Batch | None = None

    @property
    def spans(self) -> Mapping[str, Tensor]:
        """Of sequences of tokens: name -> [B, 2] int64 on the CPU, first position and end; see `Samples.spans`."""
        return self.data.spans(self.ids)

    @property
    def wrong(self) -> Tensor | None:
        """[B] int64 on the CPU, the token that would be the wrong answer; None where the data names none."""
        return self.data.wrong(self.ids)

    @property
    def weight(self) -> Tensor | int:
        """How much its mean loss counts: its samples, or of sequences the tokens that are to be predicted."""
        return (self.target != IGNORED).sum() if self.data.of_tokens else len(self.ids)

    def to(self, device: torch.device | str, **options: Any) -> Batch:
        """The batch with inputs and target on the device; the ids stay."""
        return replace(
            self, inputs=_on(device, self.inputs, options), target=_on(device, self.target, options)
        )


def _on(device: torch.device | str, value: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _on(device, member, options) for name, member in value.items()}
    return value.to(device, **options)


class BatchSource(Protocol):
    """What batches are made from."""

    @property
    def settings(self) -> Settings:
        """The settings of the experiment."""

    @property
    def device(self) -> torch.device:
        """Where batches are put."""


Seeded = Callable[[int], AbstractContextManager[None]]


def _seeded(config: Data, split: Split) -> Seeded | None:
    """How to seed what is drawn for a sample; None where nothing is drawn."""
    if config.name == data.PYTHON:
        return all_seeded
    return seeded if data.transforms_draw(config, split) else None


class _Numbered(Dataset[tuple[int, Any, Tensor]]):
    """Samples with their ids. What is drawn for one follows from the seed, the epoch and the sample alone.

    So it is the same in whichever process it is loaded, and wherever in the epoch a run begins.

    seed:   of the run
    seeded: a block in which draws follow from a seed; None: nothing is drawn
    epoch:  the one under way
    """

    def __init__(self, samples: Dataset[tuple[Any, Tensor]], seed: int, seeded: Seeded | None) -> None:
        self._samples = samples
        self._seed = seed
        self._seeded = seeded
        self.epoch = 0

    @property
    def draws(self) -> bool:
        """Whether anything is drawn for a sample."""
        return self._seeded is not None

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[int, Any, Tensor]:
        """The sample, and its number as it was asked for: `~n` is sample n as a pattern, see `RankRows`."""
        number = max(index, ~index)
        if self._seeded is None:
            inputs, target = self._samples[number]
        else:
            with self._seeded(derived_seed(self._seed, self.epoch, number)):
                inputs, target = self._samples[number]
        return index, inputs, target

    def __getitems__(self, indices: list[int]) -> _Whole | list[tuple[int, Any, Tensor]]:
        """A batch, which `_collated` gets: torch's loader asks for it where it is there."""
        take = getattr(self._samples, "batch", None)
        found = (
            None if take is None or self._seeded is not None else take([max(each, ~each) for each in indices])
        )
        return [self[index] for index in indices] if found is None else _Whole(torch.tensor(indices), *found)


class _Whole(NamedTuple):
    """A batch that was taken in one go: ids [B], inputs and target [B, ...]."""

    ids: Tensor
    inputs: Any
    target: Tensor


def _collated(found: _Whole | list[tuple[int, Any, Tensor]]) -> Any:
    return found if isinstance(found, _Whole) else default_collate(found)


class _From(Sampler[int]):
    """The order of another sampler without its first `skipped` samples, which are not loaded."""

    def __init__(self, order: Sampler[int]) -> None:
        self._order = order
        self.skipped = 0

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self._order), self.skipped, None)

    def __len__(self) -> int:
        return len(self._order)  # type: ignore[arg-type]


class Batches:
    """One pass over a split after the other; `len` is the number of batches of a pass.

    data:    the samples themselves
    samples: how many there are
    shuffle: a new order in each epoch, decided by the seed and the epoch alone
    ranks:   the processes that split each batch
    """

    def __init__(
        self, prepared: BatchSource, split: Split, *, shuffle: bool = False, ranks: Ranks = ALONE
    ) -> None:
        settings = prepared.settings
        self._device = prepared.device
        self._split = split
        self._seed = settings.seed
        self._batch_size = settings.data.batch_size
        self._generator = torch.Generator()
        if not ranks.is_main:
            ranks.meet()
        samples = data.load(settings.data, split, seed=settings.seed)
        if ranks.is_main:
            ranks.meet()  # rank 0 may have downloaded what the others then find
        self.data = samples
        self.samples = len(samples)
        self._numbered = _Numbered(samples, settings.seed, _seeded(settings.data, split))
        order = RandomSampler(samples, generator=self._generator) if shuffle else SequentialSampler(samples)
        self._order = _From(order)
        self._shuffle = shuffle
        self._loader: DataLoader[Any] = DataLoader(
            self._numbered,
            **_rows_of(ranks, self._order, settings.data.batch_size),
            num_workers=settings.data.workers,
            worker_init_fn=left_to_main,
            generator=self._generator,
            pin_memory=prepared.device.type == "cuda",
        )
        limit = settings.train.limit_batches
        self._length = len(self._loader) if limit is None else min(limit, len(self._loader))
        self._in_memory = (
            samples if isinstance(samples, TensorSamples) and not self._loads and not ranks.several else None
        )
        in_reach = self.samples if shuffle else self._length * settings.data.batch_size
        self._population = min(self.samples, in_reach)

    @property
    def _loads(self) -> bool:
        """Whether torch's loader is needed; where not, it would only add to the time."""
        return self._loader.num_workers > 0 or self._loader.pin_memory or self._numbered.draws

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one pass, without its first `start`."""
        self._generator.manual_seed(derived_seed(self._seed, number))
        if self._in_memory is not None:
            yield from self._rows(self._in_memory, start)
            return
        self._numbered.epoch = number
        self._order.skipped = start * self._batch_size
        for at, (ids, inputs, target) in enumerate(islice(self._loader, self._length - start), start):
            batch = self._batch(at, ids, inputs, target)
            yield batch if int(ids[0]) >= 0 else _without_rows(batch)

    def _rows(self, samples: TensorSamples, start: int) -> Iterator[Batch]:
        """What the loader would give, in the same order: it draws one number before the order is drawn."""
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._generator)
        order = _order(self.samples, self._generator if self._shuffle else None)
        rest = order[start * self._batch_size : self._length * self._batch_size]
        for at, ids in enumerate(rest.split(self._batch_size) if len(rest) else (), start):
            yield self._batch(at, ids, *samples.batch(ids))

    def _batch(self, at: int, ids: Tensor, inputs: Any, target: Any) -> Batch:
        """Number `at` of the pass."""
        whole = min(self._batch_size, self.samples - at * self._batch_size)
        if self._device.type != "cpu":
            inputs, target = self._placed(inputs), self._placed(target)
        return Batch(ids, inputs, target, self._population, self._split, self.data, whole)

    def _placed(self, value: Any) -> Any:
        return _on(self._device, value, {"non_blocking": True})


def _order(samples: int, generator: torch.Generator | None) -> Tensor:
    """[samples]: the numbers as RandomSampler draws them, or as they are."""
    if generator is None:
        return torch.arange(samples, device="cpu")
    return torch.randperm(samples, generator=generator, device="cpu")


def _without_rows(batch: Batch) -> Batch:
    ids, inputs, target = without_rows(batch.ids, batch.inputs, batch.target)
    return replace(batch, ids=ids, inputs=inputs, target=target, pattern=replace(batch, ids=~batch.ids))


def _rows_of(ranks: Ranks, order: _From, batch_size: int) -> dict[str, Any]:
    """How a loader makes batches of an order: whole ones, or the rank's rows of each."""
    if not ranks.several:
        return {"batch_size": batch_size, "sampler": order, "collate_fn": _collated}
    rows = RankRows(order, batch_size, ranks.rank, ranks.size)
    return {"batch_sampler": rows, "collate_fn": _collated}


class BatchesOfSplits:
    """One pass over several splits, one after the other; `len` is the number of batches of all of them.

    parts: the batches of each split; a split that the data does not have is left out
    ranks: the processes that split each batch
    """

    def __init__(self, prepared: Prepared, splits: Sequence[Split], ranks: Ranks = ALONE) -> None:
        sizes = prepared.data.sizes
        there = [split for split in splits if sizes[split] != 0 or len(splits) == 1]
        self.parts = {split: Batches(prepared, split, ranks=ranks) for split in there}

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one pass, without its first `start`."""
        for part in self.parts.values():
            skipped = min(start, len(part))
            start -= skipped
            if skipped < len(part):
                yield from part.epoch(number, skipped)

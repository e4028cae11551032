"""Batches of a split in a reproducible order, each with the ids of its samples, on the device of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hookrun import data
from hookrun.data import Split
from hookrun.data.collate import Collate, collate_of, stacked
from hookrun.data.samples import IGNORED, Samples, TensorSamples
from hookrun.engine.keys import GIVEN
from hookrun.engine.runtime.rng import derived_seed
from hookrun.engine.spec.when import Wanted, typed
from hookrun.engine.values.containers import children, rebuild, replaced
from hookrun.engine.values.tensors import pins
from hookrun.errors import HookrunError
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.experiment.session import all_seeded, seeded
from hookrun.run.experiment.settings import Settings
from hookrun.run.ranks import ALONE, Ranks, share
from hookrun.signals import left_to_main


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of one split.

    ids:        [B] int64 on the CPU, the numbers of the samples
    inputs:     a tensor [B, ...], or several by name; anything that `data.collate` makes
    target:     [B, ...]; anything that `data.collate` makes
    population: how many samples of the split the run can reach
    data:       the samples from which the batch was taken
    whole:      the number of rows of the batch on all ranks together
    labels:     the targets as they were read, on the CPU
    pattern:    if this rank has no row of the batch, a batch with a row of another rank, for sharded models, whose
                forward all ranks must call
    """

    ids: Tensor
    inputs: Any
    target: Any
    population: int
    split: Split
    data: Samples
    whole: int
    labels: Any
    pattern: Batch | None = None

    def matches(self, wanted: Wanted) -> Tensor:
        """[B] bool on the CPU: the samples that have in each of the fields one of the wanted values."""
        matching = torch.ones(len(self.ids), dtype=torch.bool, device="cpu")
        for name, values in wanted.items():
            allowed = {typed(value) for value in values}
            is_allowed = [typed(value) in allowed for value in self._field(name)]
            matching &= torch.tensor(is_allowed, dtype=torch.bool, device="cpu")
        return matching

    def _field(self, name: str) -> list[Any]:
        """The value of each sample in a field of `DataInfo.known_fields`; None where it has none."""
        numbers: list[int] = self.ids.tolist()
        if name in self.data.field_names:
            return [self.data.fields(number).get(name) for number in numbers]
        if name in ("label", "class"):
            labels: list[int] = self.labels.reshape(-1).tolist()
            if name == "label":
                return labels
            return [self.data.class_name(label) for label in labels]
        if name == "file":
            return [self.data.file(number) for number in numbers]
        return numbers if name == "sample" else [self.split] * len(numbers)

    @property
    def targets(self) -> Tensor:
        """[R, ...]: the target of each row for which metrics are computed, by default of each sample.

        [B, 0] if the targets are not one tensor.
        """
        if not isinstance(self.target, Tensor):
            return torch.empty(len(self.ids), 0)
        return self.target if self.target.dim() else self.target[None]

    @property
    def classes(self) -> Tensor | None:
        """[B] int64 on the CPU, the label of each sample; None if the targets are not labels."""
        labels = self.labels
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != self.ids.shape:
            return None
        return labels.long()

    @property
    def spans(self) -> Mapping[str, Tensor]:
        """For sequences of tokens: name -> [B, 2] int64 on the CPU, first position and end; see `Samples.spans`."""
        return self.data.spans(self.ids)

    @property
    def wrong(self) -> Tensor | None:
        """[B] int64 on the CPU, the token of the wrong answer; None if the data does not name one."""
        return self.data.wrong(self.ids)

    @property
    def weight(self) -> Tensor | int:
        """The weight of its mean loss: the number of samples, or for sequences of tokens to be predicted."""
        if not self.data.of_tokens:
            return self.ids.numel()
        # counted on the CPU; a rank without rows still has the labels of another rank's row
        return (self.labels[: len(self.ids)] != IGNORED).sum()

    def weight_without(self, ignored: int | None) -> Tensor | int:
        """The weight of its mean loss over labels: the number of those to be predicted.

        ignored: the label that does not count; None: the loss is a mean over samples or tokens
        """
        if ignored is None or self.data.of_tokens or self.labels.is_floating_point() or not self.ids.numel():
            return self.weight
        return int((self.labels != ignored).sum())

    def copied(self) -> Batch:
        """The batch with copies of its inputs, into which a model may write."""
        inputs = rebuild(
            self.inputs,
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
        )
        return replace(self, inputs=inputs)

    def to(self, device: torch.device | str, **options: Any) -> Batch:
        """The batch with inputs and target on the device; the ids stay on the CPU."""
        inputs = moved(self.inputs, device, **options)
        return replace(self, inputs=inputs, target=moved(self.target, device, **options))


def moved(value: Any, device: torch.device | str, **options: Any) -> Any:
    """The value on the device: what has a method `to` moves itself, and of containers every member is moved.

    options: of `Tensor.to`
    """
    if isinstance(value, Tensor):
        return value.to(device, **options)
    if callable(to := getattr(value, "to", None)):  # also of a PackedSequence, whose sizes stay on the CPU
        return to(device)
    new = {key: moved(member, device, **options) for key, member in children(value)}
    return replaced(value, new) if new else value


class BatchSource(Protocol):
    """The settings and the device for which batches are made."""

    @property
    def settings(self) -> Settings:
        """The settings of the experiment."""

    @property
    def device(self) -> torch.device:
        """The device of the batches."""


Seeded = Callable[[int], AbstractContextManager[None]]


@dataclass(eq=False)
class _Numbered(Dataset[tuple[int, Any, Tensor]]):
    """Samples with their ids. The random draws of a sample depend only on the seed, the epoch and the sample.

    So the draws are the same in every worker process, and in a run that resumes within the epoch.

    seed:   the seed of the run
    seeded: a context manager that seeds the draws of its block; None: nothing is drawn
    collate: samples -> inputs and targets of a batch
    epoch:  the current epoch
    """

    samples: Samples
    seed: int
    seeded: Seeded | None
    collate: Collate
    epoch: int = 0

    def __getitems__(self, indices: list[int]) -> Any:
        """The numbers of a batch [B], its inputs and targets [B, ...]; torch's loader calls this method.

        The index `~n` is sample n used as a pattern, see `rows_of_rank`. A worker returns an error alone, since to one
        that is raised torch adds the worker's traceback.
        """
        try:
            return self._read(indices)
        except HookrunError as error:
            if get_worker_info() is None:
                raise
            return (HookrunError(str(error)),)

    def _read(self, indices: list[int]) -> Any:
        numbers = [max(index, ~index) for index in indices]
        read = None
        if self.seeded is None and self.collate is stacked:
            read = self.samples.batch(numbers)
        if read is None:
            samples = [self.sample(number) for number in numbers]
            with self._drawing(numbers[0], "collate"):
                read = self.collate(samples)
        return (torch.tensor(indices), *read)

    def sample(self, number: int) -> Any:
        """One sample as the batches of the epoch have it."""
        with self._drawing(number):
            return self.samples[number]

    def _drawing(self, *key: int | str) -> AbstractContextManager[None]:
        """Seed the draws of the block by the seed of the run, the epoch and this key, if anything is drawn."""
        if self.seeded is None:
            return nullcontext()
        return self.seeded(derived_seed(self.seed, self.epoch, *key))


def numbered(settings: Settings, samples: Samples) -> _Numbered:
    """The samples with their ids, drawn as in a run with these settings."""
    draws: Seeded | None = seeded if samples.draws else None
    of_user = settings.data.name == data.PYTHON or (settings.data.name == GIVEN and samples.draws)
    if of_user or settings.data.has_own_collate:
        draws = all_seeded
    return _Numbered(samples, settings.seed, draws, collate_of(settings.data))


class Batches:
    """The batches of a split; `len` is the number of batches of a pass. Each ``for batch in batches`` is one epoch.

    split:   the name of the split
    data:    the samples
    samples: the number of samples
    shuffle: a new order in each epoch, which depends only on the seed and the epoch
    ranks:   the processes that split each batch
    read:    samples of splits that were read before
    """

    def __init__(
        self,
        prepared: BatchSource,
        split: Split,
        *,
        shuffle: bool = False,
        ranks: Ranks = ALONE,
        read: Mapping[Split, Samples] = MappingProxyType({}),
    ) -> None:
        settings = prepared.settings
        self._device = prepared.device
        self.split = split
        self._seed = settings.seed
        self._batch_size = settings.data.samples_of_batch
        self._pins = pins(prepared.device.type)
        self._generator = torch.Generator()
        samples = read.get(split)
        if samples is None:
            samples = data.load(settings.data, split, seed=settings.seed)
        self.data = samples
        self.samples = len(samples)
        self._numbered = numbered(settings, samples)
        self._shuffle = shuffle
        self._ranks = ranks
        # The numbers of the samples of each batch of the current epoch that this rank loads.
        self._indices = list[list[int]]()
        self._loader: DataLoader[Any] = DataLoader(
            self._numbered,
            batch_sampler=self._indices,
            collate_fn=tuple,  # the dataset itself collates
            num_workers=settings.data.workers,
            worker_init_fn=left_to_main,
            generator=self._generator,
            pin_memory=self._pins,
        )
        self._length = -(-self.samples // self._batch_size)
        if samples.sampler is not None:
            self._length = len(samples.sampler)
        if settings.train.limit_batches is not None:
            self._length = min(settings.train.limit_batches, self._length)
        # torch's loader is needed for workers and transforms; otherwise reading from memory is faster.
        loads = self._loader.num_workers > 0 or self._numbered.seeded is not None or ranks.several
        loads = loads or bool(settings.data.unstacked)
        self._in_memory = samples if isinstance(samples, TensorSamples) and not loads else None
        self._population = self.samples
        if not shuffle and samples.sampler is None:
            self._population = min(self.samples, self._length * self._batch_size)
        self._next_epoch = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch; the first is epoch 0."""
        # A generator, so that an epoch is counted only when its first batch is read.
        self._next_epoch += 1
        yield from self.epoch(self._next_epoch - 1)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one pass, without its first `start`."""
        batches = self._ids_by_batch(number, start)
        if self._in_memory is not None:
            for at, ids in enumerate(batches, start):
                inputs, target = self._in_memory.batch(ids)
                if self._pins:
                    inputs = inputs.pin_memory()
                    target = target.pin_memory()
                yield self._batch(at, ids, inputs, target)
            return
        self._numbered.epoch = number
        self._indices[:] = [rows_of_rank(ids.tolist(), self._ranks.rank, self._ranks.size) for ids in batches]
        for at, read in enumerate(self._loader, start):
            if isinstance(read[0], HookrunError):
                raise read[0]
            batch = self._batch(at, *read)
            yield batch if int(read[0][0]) >= 0 else _without_rows(batch)

    def _ids_by_batch(self, epoch: int, start: int) -> Sequence[Tensor]:
        """The numbers of the samples of each batch of an epoch from the batch `start`."""
        if self.data.sampler is not None:
            return self._sampled(self.data.sampler, epoch)[start:]
        rest = self._order(epoch)[start * self._batch_size : self._length * self._batch_size]
        return rest.split(self._batch_size) if len(rest) else ()

    def _sampled(self, sampler: Any, epoch: int) -> list[Tensor]:
        """The batches of a user's own sampler, whose draws depend only on the seed of the run and the epoch."""
        seed = derived_seed(self._seed, epoch)
        generator = getattr(getattr(sampler, "sampler", sampler), "generator", None)
        before = None if generator is None else generator.get_state()
        with all_seeded(seed):
            if generator is not None:
                generator.manual_seed(seed)
            batches = [torch.tensor(numbers, dtype=torch.int64) for numbers in islice(sampler, self._length)]
        if generator is not None:
            generator.set_state(before)
        return batches

    def _order(self, epoch: int) -> Tensor:
        """[samples]: their numbers in the order of torch's loader, which draws one number first."""
        if not self._shuffle:
            return torch.arange(self.samples, device="cpu")
        generator = self._generator.manual_seed(derived_seed(self._seed, epoch))
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return torch.randperm(self.samples, generator=generator, device="cpu")

    def _batch(self, at: int, ids: Tensor, inputs: Any, target: Any) -> Batch:
        """The batch with the number `at` in the pass, on the device."""
        whole = min(self._batch_size, self.samples - at * self._batch_size)
        if self.data.sampler is not None:
            whole = len(ids)
        batch = Batch(ids, inputs, target, self._population, self.split, self.data, whole, target)
        return batch if self._device.type == "cpu" else batch.to(self._device, non_blocking=self._pins)


def rows_of_rank(batch: Sequence[int], rank: int, size: int) -> list[int]:
    """The sample numbers of the rows of a batch that this rank loads.

    A rank without rows loads the first row of the batch as a pattern of its shape. The number `n` of this row is given
    as `~n`, and the row is removed from the batch.
    """
    return [batch[place] for place in share(len(batch), rank, size)] or [~batch[0]]


def _without_rows(batch: Batch) -> Batch:
    """The batch without rows, with the structure, dtypes and other dimensions; its row becomes the pattern."""
    return replace(
        batch,
        ids=batch.ids[:0],
        inputs=rebuild(batch.inputs, lambda leaf: leaf[:0]),
        target=batch.target[:0],
        pattern=replace(batch, ids=~batch.ids),
    )


class BatchesOfSplits:
    """The batches of several splits, one split after the other; `len` is the number of batches of all of them.

    split: the names of the splits, for messages
    parts: the batches of each split; a split that the data does not have is left out
    ranks: the processes that split each batch
    """

    def __init__(self, prepared: Prepared, splits: Sequence[Split], ranks: Ranks = ALONE) -> None:
        sizes = prepared.data.sizes
        self.split = " and ".join(splits)
        self.parts = dict[Split, Batches]()
        for split in splits:
            if sizes[split] != 0 or len(splits) == 1:
                self.parts[split] = Batches(prepared, split, ranks=ranks, read=prepared.read)

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one pass, without its first `start`."""
        for part in self.parts.values():
            skipped = min(start, len(part))
            start -= skipped
            if skipped < len(part):
                yield from part.epoch(number, skipped)

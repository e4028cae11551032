"""Values from files and other runs: one tensor, or one row for each sample; and how they are combined."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Generator, Tensor

from hookrun.actions.values import InlineFunction
from hookrun.errors import HookrunError
from hookrun.store.captures.read import StoredCapture
from hookrun.trust.callables import tensor_digest
from hookrun.values.index import Item


class Rows(Protocol):
    """A value for each sample of a batch.

    shape:  of one row
    dtype:  of the rows
    digest: a hash of the rows, for the plan's hash
    draws:  rows are drawn at random at each firing
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str
    draws: bool

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape] of the samples [B] int64, on the CPU.

        Raises HookrunError for a sample without a row.
        """

    def missing(self, samples: Tensor) -> Tensor:
        """The samples that have no row but need one."""

    def lacks(self, samples: Tensor) -> str:
        """The error message for samples without a row."""


class PendingRun:
    """A value of a run that does not exist yet.

    name: the name of the run in the experiment
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = f"not yet run: {name}"


Found = Tensor | Rows | PendingRun
"""A value from a file or from another run: one tensor, a row for each sample, or one that is not known yet."""

Source = Found | InlineFunction
"""A value from a file or run, or from Python: a tensor, or a function of the action's tensor."""


def digest_of(source: Source) -> str:
    """The hash of the value."""
    return tensor_digest(source) if isinstance(source, Tensor) else source.digest


def computable(tensor: Tensor) -> Tensor:
    """The tensor as float32 if its dtype is smaller, else unchanged."""
    if tensor.dtype is torch.float32:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class CaptureRows:
    """The rows of a capture by sample: each sample's own row, or that of another sample.

    Rows are read from disk when they are used.

    part: the indices of the rows to use
    """

    def __init__(self, capture: StoredCapture, name: str, part: Tensor, *, resample: bool) -> None:
        self._capture = capture
        self._name = name
        self.draws = resample
        self.shape, self.dtype = capture.shape[1:], capture.dtype
        self._ids, order = capture.sample_ids[part].sort()
        self._order = part[order]
        what = [name, resample, list(capture.shape), str(capture.dtype), self._ids.tolist()]
        self.digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape] of the samples [B]."""
        places = self._places(samples)
        known = self._ids[places] == samples
        if not self.draws:
            if not known.all():
                raise HookrunError(self.lacks(samples[~known]))
        else:  # a row of another sample, if there is one
            count = len(self._ids)
            shift = torch.randint(1, max(count, 2), samples.shape, generator=generator)
            drawn = torch.randint(0, count, samples.shape, generator=generator)
            places = torch.where(known, (places + shift) % count, drawn)
        rows: Tensor = self._capture[self._order[places]]
        return rows

    def missing(self, samples: Tensor) -> Tensor:
        """The samples that have no row but need one."""
        return samples[self._ids[self._places(samples)] != samples] if not self.draws else samples[:0]

    def lacks(self, samples: Tensor) -> str:
        """The error message for samples without a row."""
        shown = ", ".join(map(str, samples[:4].tolist())) + (", …" if len(samples) > 4 else "")
        return f"{self._name} has no row of sample {shown}: {ids_text(self._capture)}"

    def _places(self, samples: Tensor) -> Tensor:
        return torch.searchsorted(self._ids, samples).clamp_max(len(self._ids) - 1)


def ids_text(capture: StoredCapture) -> str:
    """Text with the number of samples of a capture and the range of their ids."""
    ids = capture.sample_ids
    return f"it has {len(ids)} samples from {int(ids.min())} to {int(ids.max())}"


class MappedRows:
    """Rows that a function computes from one or two values; a tensor is the same for each sample.

    change: [B, *shape of a row] of each value -> [B, ...], for any B
    how:    text that identifies values and change, for the hash
    """

    def __init__(self, values: Sequence[Tensor | Rows], change: Callable[..., Tensor], how: str) -> None:
        self._values, self._change = values, change
        self._rows = [value for value in values if not isinstance(value, Tensor)]
        example = self._changed(lambda rows: torch.empty((), dtype=rows.dtype).expand(1, *rows.shape))
        self.shape, self.dtype = tuple(example.shape[1:]), example.dtype
        self.draws = any(rows.draws for rows in self._rows)
        self.digest = hashlib.sha256(how.encode()).hexdigest()

    def _changed(self, read: Callable[[Rows], Tensor]) -> Tensor:
        return self._change(*(value if isinstance(value, Tensor) else read(value) for value in self._values))

    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape]."""
        return self._changed(lambda rows: rows.of(samples, generator))

    def missing(self, samples: Tensor) -> Tensor:
        """The samples that have no row but need one."""
        missing: Tensor = torch.cat([rows.missing(samples) for rows in self._rows]).unique()
        return missing

    def lacks(self, samples: Tensor) -> str:
        """The error message for samples without a row."""
        return "; ".join(rows.lacks(samples) for rows in self._rows if len(rows.missing(samples)))


def form(source: Source) -> tuple[str, int]:
    """The shape of the value, or of one row of it, as text, and its bytes."""
    if isinstance(source, PendingRun):
        return "not known yet", 0
    if isinstance(source, InlineFunction):
        return "computed at each firing", 0
    shape = tuple(source.shape)
    return str(list(shape)), math.prod(shape) * source.dtype.itemsize


def part(source: Tensor | Rows, items: tuple[Item, ...]) -> Tensor | Rows:
    """The part of the tensor, or of each row. Raises IndexError if there is no such part."""
    plain = tuple(list(item) if isinstance(item, tuple) else item for item in items)
    if isinstance(source, Tensor):
        taken: Tensor = source[plain]
        return taken
    return MappedRows([source], lambda rows: rows[slice(None), *plain], f"{source.digest} {items}")


def difference(left: Tensor | Rows, right: Tensor | Rows) -> Tensor | Rows:
    """One value minus another of the same shape."""

    def subtract(left: Tensor, right: Tensor) -> Tensor:
        return computable(left) - computable(right)

    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return subtract(left, right)
    return MappedRows([left, right], subtract, f"{digest_of(left)}-{digest_of(right)}")


def multiple(source: Tensor | Rows, factor: float) -> Tensor | Rows:
    """The value times the factor."""
    if isinstance(source, Tensor):
        return computable(source) * factor
    return MappedRows([source], lambda rows: computable(rows) * factor, f"{source.digest} times {factor!r}")


BY_TOKEN = (
    "it has a row for each token: capture one position of each sample, such as tokens: -1, or the whole value, from "
    "which `at: same` takes the tokens"
)
"""The hint for a capture with several rows for each sample, where one is needed."""


def is_by_token(capture: StoredCapture) -> bool:
    """Whether it was captured with `tokens`, so that its rows are of tokens."""
    return bool((capture.positions >= 0).any())

"""The faults of a firing: where they are in the whole tensor, drawn for all ranks together or repeated from a list."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookrun.engine.runtime.clock import RowsOfRank
from hookrun.engine.values.containers import readable
from hookrun.engine.values.tensors import on_device

Draw = Callable[[int, np.random.Generator], Any]
"""(size, generator) -> an array [k] int64 of different numbers below size."""

_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

_SAME = {"path", "mode", "epoch", "step", "call", "split", "dtype", "shape", "sample"}
"""What must be as it was for a fault to be repeated."""


@dataclass(frozen=True)
class Faulty:
    """A tensor whose bits are flipped.

    rows:    which rows of a batch it has; None: all
    samples: [B], the ids of its rows; None: not known
    moment:  where and when it is flipped, as its records say
    """

    x: Tensor
    rows: RowsOfRank | None
    samples: Tensor | None
    moment: Mapping[str, Any]

    def __post_init__(self) -> None:
        """ValueError if the bits cannot be read now, or if there is no row for each sample of this rank."""
        seen = readable(self.x)
        shape = list(self.x.shape)
        if torch._C._get_tracing_state() or seen is None or list(seen.shape) != shape:
            raise ValueError(
                "bits of a tensor that is traced, on the meta device or under vmap cannot be flipped"
            )
        if self.rows is not None and shape[:1] != [len(self.rows.mine)]:
            raise ValueError(f"this rank has {len(self.rows.mine)} rows, the tensor has shape {shape}")

    @property
    def form(self) -> dict[str, Any]:
        """dtype, and the shape with the rows of all ranks."""
        return {
            "dtype": str(self.x.dtype).removeprefix("torch."),
            "shape": list(self.x.shape) if self.rows is None else [self.rows.whole, *self.x.shape[1:]],
        }

    @property
    def start(self) -> int:
        """How many elements the ranks before this one have."""
        return 0 if self.rows is None else self.rows.mine.start * self.x[:1].numel()

    def rows_of(self, elements: Tensor) -> Tensor:
        """The row, which is a sample, of each element."""
        return elements // self.x[:1].numel() if len(elements) and self.x.dim() else elements

    def ids(self, elements: Tensor) -> Sequence[int | None]:
        """The sample of each element; None if the tensor does not have a row for each sample."""
        if self.samples is None or self.samples.shape != self.x.shape[:1]:
            return [None] * len(elements)
        return self.samples[self.rows_of(elements)].tolist()

    def drawn(
        self, index: Tensor | None, bits: Sequence[int], draw: Draw, seed: int, by_sample: bool
    ) -> Tensor:
        """[k, 2]: elements of this rank, drawn from all or from those of `index`, and the bit of each."""
        if by_sample:
            if not self.x.dim():
                raise ValueError("per: sample: a tensor without dimensions has no samples")
            index = self._sorted_by_row(index)
        count = self.x.numel() if index is None else len(index)
        before = 0  # how many elements the ranks before this one choose from
        sizes = [count]
        if by_sample and index is not None:
            sizes = self.rows_of(index).bincount().tolist()
        if self.rows is not None and count:  # every row has as many
            of_row = count // len(self.rows.mine)
            sizes = [of_row] * self.rows.whole if by_sample else [of_row * self.rows.whole]
            before = of_row * self.rows.mine.start
        places = _drawn_places(sizes, len(bits), draw, seed)
        numbers = places // len(bits) - before
        chosen_bits = torch.tensor(bits, device="cpu")[places % len(bits)]
        is_mine = (numbers >= 0) & (numbers < count)
        elements = numbers[is_mine]
        if index is not None:
            elements = index[elements]
        return torch.stack([elements, chosen_bits[is_mine]], dim=1)

    def _sorted_by_row(self, index: Tensor | None) -> Tensor:
        """The elements of `index`, or all elements, row by row."""
        if index is None:
            index = torch.arange(self.x.numel(), device="cpu")
        return index[self.rows_of(index).argsort(stable=True)]

    def listed(self, lines: Sequence[Mapping[str, Any]]) -> Tensor:
        """[k, 2]: the same for the faults of these lines that are on this rank. ValueError if one does not fit."""
        for line in lines[:1]:
            _require_same(line, {**self.moment, **self.form})
        mine: list[Mapping[str, Any]] = []
        pairs: list[list[int]] = []
        for line in lines:
            element = line["element"] - self.start
            if 0 <= element < self.x.numel():
                mine.append(line)
                pairs.append([element, line["bit"]])
        faults = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2)
        for line, sample in zip(mine, self.ids(faults[:, 0]), strict=True):
            _require_same(line, {"sample": sample})
        size = math.prod(self.form["shape"])
        width = 8 * self.x.element_size()
        for line in lines:
            if line["element"] >= size or line["bit"] >= width:
                raise ValueError("faults: the list has an element or a bit that the tensor does not have")
        return faults

    def flipped(self, faults: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
        """A copy of x with these bits flipped, and a record of each. faults: [k, 2], elements and bits."""
        if not len(faults):
            return self.x.clone(), []
        faults = faults.unique(dim=0)
        bits = faults[:, 1]
        # several bits of one element are flipped together
        elements, places = faults[:, 0].unique(return_inverse=True)
        masks = torch.zeros_like(elements)
        masks.index_add_(0, places, torch.ones_like(places) << bits)
        table = torch.stack([*torch.unravel_index(elements, (1, *self.x.shape)), masks])
        *at, masks = on_device(table, self.x.device).unbind()
        new = self.x.resolve_neg().clone()  # whose gradient passes straight through
        integers = new.detach().view(_INTEGERS[8 * self.x.element_size()]).unsqueeze(0)
        old = integers[tuple(at)]
        changed = old ^ masks.to(old.dtype)
        integers[tuple(at)] = changed
        values = torch.stack([old, changed]).cpu()[:, places].view(self.x.dtype)
        before, after = values.tolist()
        rows = zip(
            self.ids(faults[:, 0]),
            (faults[:, 0] + self.start).tolist(),
            bits.tolist(),
            before,
            after,
            strict=True,
        )
        records: list[dict[str, Any]] = []
        for row in rows:
            record = dict(zip(_OF_FAULT, row, strict=True))
            records.append({**record, **self.form})
        return new, records


_OF_FAULT = ("sample", "element", "bit", "before", "after")
"""The keys of a record that differ between the faults of a firing."""


def _drawn_places(sizes: Sequence[int], bits: int, draw: Draw, seed: int) -> Tensor:
    """The numbers of bits, drawn among the `bits` bits of each of `size` elements, for one size after the other."""
    generator = np.random.default_rng(seed)
    parts = [np.empty(0, np.int64)]
    start = 0
    for size in sizes:
        parts.append(start * bits + draw(size * bits, generator))
        start += size
    return torch.from_numpy(np.concatenate(parts))


def _require_same(line: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key in here.keys() & _SAME:
        if line.get(key) != here[key]:
            raise ValueError(
                f"faults: call {line['draw'][0]} has {key} {line.get(key)} in the list and {here[key]} here: a list "
                "fits a run of the same task, data and order of samples"
            )

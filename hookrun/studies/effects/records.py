"""effects.safetensors and effects.csv: what each cell of a grid does to a metric, written and read back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookrun.errors import Lookup
from hookrun.studies.kit.files import (
    StoreError,
    decode,
    encode,
    read_tensors,
    replacing,
    write_table,
    write_tensors,
)

if TYPE_CHECKING:
    from hookrun.studies.kit.files import Run

EFFECTS = "effects.safetensors"
EFFECTS_TABLE = "effects.csv"

EXACT, GRADIENT, RESTORED, PLACEBO, SEEDS = "exact", "gradient", "restored", "placebo", "seeds"
OF_SAMPLES, PLAIN_OF_SAMPLES, CLEAN_OF_SAMPLES = "exact_samples", "unedited_samples", "clean_samples"
PLAIN, CLEAN = "unedited", "clean"
SAMPLES = "samples"
_OF_CELLS = {EXACT, GRADIENT, RESTORED, PLACEBO, SEEDS, OF_SAMPLES}
_NUMBERS = (EXACT, GRADIENT, RESTORED, "placebo_mean", "placebo_std")
"""The columns of effects.csv beside the labels."""


class Effects(Lookup[Tensor]):
    """The effects of one hook at many sites: name -> tensor.

    exact:            the metric of each cell, the mean over samples; NaN where there is no such site
    gradient:         the unedited metric plus the estimate to first order
    restored:         (cell - unedited) / (clean - unedited)
    placebo, seeds:   the metric of each cell with values of other samples, with other seeds: [n, *cells]
    exact_samples:    [*cells, samples]
    unedited, clean:  the metric without the hook, and in the run to compare with; the mean over samples
    unedited_samples, clean_samples: [samples]

    axes:    name of an axis of `exact` -> its labels
    samples: the number of each sample
    faults:  cells in which the metric of a sample is not finite, as lines of text
    about:   hook, metric, split
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        axes: Mapping[str, Sequence[Any]],
        samples: Sequence[int],
        about: Mapping[str, str],
        faults: Sequence[str] = (),
    ) -> None:
        super().__init__("tensor", "the effects", tensors)
        self.faults = faults
        self.axes = {name: list(labels) for name, labels in axes.items()}
        self.samples, self.about = list(samples), dict(about)

    @property
    def main(self) -> Tensor:
        """The exact values; without them, the estimate."""
        return self[EXACT] if EXACT in self else self[GRADIENT]

    def names(self) -> list[str]:
        """``module=relu1, heads=0`` for each cell, in the order of the axes."""
        places = product(*self.axes.values())
        return [
            ", ".join(f"{key}={label}" for key, label in zip(self.axes, labels, strict=True))
            for labels in places
        ]

    def of_cells(self) -> dict[str, float]:
        """``exact module=relu1, heads=0`` -> its value, for each cell that has one; also gradient and restored."""
        return {
            f"{name} {cell}": value
            for name in (EXACT, GRADIENT, RESTORED)
            if name in self
            for cell, value in zip(self.names(), self[name].flatten().tolist(), strict=True)
            if value == value
        }

    def strongest(self) -> str:
        """A line about the cell with the largest effect."""
        values, plain = self.main.flatten(), float(self[PLAIN])
        at = int((values - plain).abs().nan_to_num(-1.0).argmax())
        of = f"{self.about.get('metric')} {float(values[at]):.4g}, without the hook {plain:.4g}"
        return f"largest effect: {self.names()[at]}: {of}"

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each cell that was computed: its labels, then the numbers of effects.csv; None: not computed."""
        columns = {name: self[name] for name in (EXACT, GRADIENT, RESTORED) if name in self}
        if PLACEBO in self:
            columns |= {
                "placebo_mean": self[PLACEBO].mean(0),
                "placebo_std": self[PLACEBO].std(0, correction=0),
            }
        nothing = [None] * self.main.numel()
        numbers = [columns[name].flatten().tolist() if name in columns else nothing for name in _NUMBERS]
        # a site that does not exist has no number at all
        there = ~(self.main.isnan() & self.get(GRADIENT, self.main).isnan())
        if OF_SAMPLES in self:
            there |= ~self[OF_SAMPLES].isnan().all(-1)
        for labels, exists, *row in zip(
            product(*self.axes.values()), there.flatten().tolist(), *numbers, strict=True
        ):
            if exists:
                yield dict(zip((*self.axes, *_NUMBERS), (*labels, *row), strict=True))


def write_effects(folder: Path, effects: Effects) -> None:
    """Write both files into the run directory; `dims` of the metadata names the dimensions of each tensor."""
    dims = {
        name: [
            *([name] if name in (PLACEBO, SEEDS) else ()),
            *(effects.axes if name in _OF_CELLS else ()),
            *([SAMPLES] if name.endswith("_samples") else ()),
        ]
        for name in effects
    }
    metadata = {
        **effects.about,
        "axes": encode(effects.axes),
        "samples": encode(effects.samples),
        "faults": encode(effects.faults),
        "dims": encode(dims),
    }
    with replacing(folder / EFFECTS) as file:
        write_tensors(file, dict(effects), metadata)
    rows = (cell.values() for cell in effects.cells())
    write_table(folder / EFFECTS_TABLE, [(*effects.axes, *_NUMBERS), *rows])


def read_effects(folder: Path) -> Effects | None:
    """The effects of a run directory; None if it has none. StoreError if the file is broken."""
    path = folder / EFFECTS
    if not os.path.lexists(path):
        return None
    tensors, about = read_tensors(path, folder)
    try:
        axes, samples = decode(about.pop("axes").encode()), decode(about.pop("samples").encode())
        faults = [str(line) for line in decode(about.pop("faults", "[]").encode())]
        about.pop("dims", None)
        sizes = [len(labels) for labels in axes.values()]
        shapes = dict.fromkeys(_OF_CELLS, sizes) | {PLAIN: [], CLEAN: [], OF_SAMPLES: [*sizes, len(samples)]}
        shapes |= {name: [len(samples)] for name in (PLAIN_OF_SAMPLES, CLEAN_OF_SAMPLES)}
        for name, tensor in tensors.items():
            grid = list(tensor.shape[1:] if name in (PLACEBO, SEEDS) else tensor.shape)
            if name in shapes and grid != shapes[name]:
                raise ValueError(f"{name} has shape {list(tensor.shape)} for axes of {shapes[name]}")
            if name in shapes and (not tensor.is_floating_point() or tensor.itemsize == 1):
                raise ValueError(f"{name} is {tensor.dtype}, expected floating point")
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise StoreError(f"{path} does not describe its axes: {error}") from error
    return Effects(tensors, axes, samples, about, faults)


def effects_of(run: Run) -> Effects:
    """`Run.effects`. StoreError if the run has no effects."""
    effects = read_effects(run.path)
    if effects is None:
        raise StoreError(f"{run.path} has no effects: they are written by task=effects")
    return effects


def numbers_to_compare(run: Run) -> dict[str, float]:
    """The value of each cell, by which two runs are compared."""
    effects = read_effects(run.path)
    return {} if effects is None else effects.of_cells()

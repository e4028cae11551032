"""effects.safetensors and effects.csv: what each cell of a grid does to a metric, written and read back."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookrun.errors import Lookup
from hookrun.store.captures.tensor_file import open_tensors, read_tensor, write_tensors
from hookrun.store.files import StoreError, replacing
from hookrun.store.format import EFFECTS, EFFECTS_TABLE, decode, encode
from hookrun.store.inside import is_there

EXACT, GRADIENT, RESTORED, PLACEBO, SEEDS = "exact", "gradient", "restored", "placebo", "seeds"
OF_SAMPLES, PLAIN_OF_SAMPLES, CLEAN_OF_SAMPLES = "exact_samples", "unedited_samples", "clean_samples"
PLAIN, CLEAN = "unedited", "clean"
SAMPLES = "samples"
_OF_CELLS = {EXACT, GRADIENT, RESTORED, PLACEBO, SEEDS, OF_SAMPLES}


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
    about:   hook, metric, split
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        axes: Mapping[str, Sequence[Any]],
        samples: Sequence[int],
        about: Mapping[str, str],
    ) -> None:
        super().__init__("tensor", "the effects", tensors)
        self.axes = {name: list(labels) for name, labels in axes.items()}
        self.samples, self.about = list(samples), dict(about)

    def of_cells(self) -> dict[str, float]:
        """``exact module=relu1, heads=0`` -> its value, for each cell that has one; also gradient and restored."""
        cells = [
            ", ".join(f"{key}={label}" for key, label in zip(self.axes, labels, strict=True))
            for labels in product(*self.axes.values())
        ]
        return {
            f"{name} {cell}": value
            for name in (EXACT, GRADIENT, RESTORED)
            if name in self
            for cell, value in zip(cells, self[name].flatten().tolist(), strict=True)
            if value == value
        }

    def dims(self, name: str) -> list[str]:
        """The names of the dimensions of a tensor."""
        of_samples = [SAMPLES] if name.endswith("_samples") else []
        front = [name] if name in (PLACEBO, SEEDS) else []
        return [*front, *(self.axes if name in _OF_CELLS else ()), *of_samples]

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each cell that was computed: its labels, then the numbers of effects.csv; None: not computed."""
        columns = {name: self.get(name) for name in (EXACT, GRADIENT, RESTORED)}
        placebo = self.get(PLACEBO)
        columns["placebo_mean"] = None if placebo is None else placebo.mean(0)
        columns["placebo_std"] = None if placebo is None else placebo.std(0, correction=0)
        there = self._there()
        for place in product(*(range(len(labels)) for labels in self.axes.values())):
            if not there[place]:
                continue
            labels = {name: labels[at] for (name, labels), at in zip(self.axes.items(), place, strict=True)}
            yield labels | {
                name: None if column is None else float(column[place]) for name, column in columns.items()
            }

    def _there(self) -> Tensor:
        """Which cells exist: a site that does not exist has no number at all."""
        of_samples = [self[name] for name in (OF_SAMPLES, GRADIENT) if name in self]
        grid = tuple(len(labels) for labels in self.axes.values())
        there = torch.zeros(grid, dtype=torch.bool)
        for values in of_samples:
            there |= ~values.isnan() if values.dim() == len(grid) else ~values.isnan().all(-1)
        return there


def write_effects(folder: Path, effects: Effects) -> None:
    """Write both files into the run directory."""
    metadata = {
        **effects.about,
        "axes": encode(effects.axes),
        "samples": encode(effects.samples),
        "dims": encode({name: effects.dims(name) for name in effects}),
    }
    with replacing(folder / EFFECTS) as file:
        write_tensors(file, dict(effects), metadata)
    text = io.StringIO(newline="")
    columns = [*effects.axes, EXACT, GRADIENT, RESTORED, "placebo_mean", "placebo_std"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(effects.cells())
    with replacing(folder / EFFECTS_TABLE) as file:
        file.write(text.getvalue().encode())


def read_effects(folder: Path) -> Effects | None:
    """The effects of a run directory; None if it has none. StoreError if the file is broken."""
    path = folder / EFFECTS
    if not is_there(path):
        return None
    with open_tensors(path, folder) as file:
        tensors = {name: read_tensor(file, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        about = dict(file.metadata() or {})
    try:
        axes, samples = decode(about.pop("axes").encode()), decode(about.pop("samples").encode())
        about.pop("dims", None)
        sizes = [len(labels) for labels in axes.values()]
        for name, tensor in tensors.items():
            grid = list(tensor.shape[1:] if name in (PLACEBO, SEEDS) else tensor.shape)
            if name in _OF_CELLS and grid[: len(sizes)] != sizes:
                raise ValueError(f"{name} has shape {list(tensor.shape)} for axes of {sizes}")
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise StoreError(f"{path} does not describe its axes: {error}") from error
    return Effects(tensors, axes, samples, about)

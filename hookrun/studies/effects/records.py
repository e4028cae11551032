"""effects.safetensors and effects.csv: what each cell of a grid does to a metric, written and read back."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hookrun.errors import Lookup, counted
from hookrun.studies.kit.record_types import ask_report, html

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.studies.kit.files import Run

EFFECTS = "effects.safetensors"
EFFECTS_TABLE = "effects.csv"

EXACT = "exact"
GRADIENT = "gradient"
RESTORED = "restored"
PLACEBO = "placebo"
SEEDS = "seeds"
PLAIN = "unedited"
CLEAN = "clean"
OF_SAMPLES = "exact_samples"
PLAIN_OF_SAMPLES = "unedited_samples"
CLEAN_OF_SAMPLES = "clean_samples"
SAMPLES = "samples"
CIRCUIT = "circuit"
CHANCE = "circuit_chance"
REPLACED = "replaced"
SIZES = "sizes"
_OF_A_CELL = (EXACT, GRADIENT, RESTORED)
"""Tensors with a number for each cell."""
_REPEATED = (PLACEBO, SEEDS)
"""Tensors with several."""
_NUMBERS = (*_OF_A_CELL, "placebo_mean", "placebo_std")
"""The columns of effects.csv beside the labels."""
T = TypeVar("T")
_ROUNDING = 2.0**-22
"""Changes are equal if they differ by less than this share of the metric: twice the precision of float32."""


@dataclass(frozen=True)
class LargestEffect:
    """The cell in which the hook changes the metric most; the first one of equal cells.

    place:  the number of the cell, in the order of `Effects.names`
    site:   axis -> label
    value:  the metric there, the mean over samples; without exact values, the estimate
    change: the value minus the metric without the hook
    ties:   how many other cells change it as much, in either direction
    """

    place: int
    site: Mapping[str, Any]
    value: float
    change: float
    ties: int

    @property
    def cell(self) -> str:
        """Its name, one of `Effects.names`."""
        return _name_of(self.site)

    @property
    def tied(self) -> str:
        """``, tied with 2 others``; ``""`` if no other cell changes the metric as much."""
        if not self.ties:
            return ""
        return f", tied with {self.ties:,} other{'s' if self.ties > 1 else ''}"


def is_change(value: float, other: float) -> bool:
    """Whether two metrics are finite, and differ by more than rounding."""
    return abs(value - other) > _ROUNDING * (abs(value) + abs(other)) and math.isfinite(value - other)


def _name_of(site: Mapping[str, Any]) -> str:
    """``module=relu1, heads=0``"""
    return ", ".join(f"{axis}={label}" for axis, label in site.items())


class Effects(html.Shown, Lookup["Tensor"]):
    """The effects of one hook at many sites: name -> tensor.

    exact:            the metric of each cell, the mean over samples; NaN where there is no such site
    gradient:         the unedited metric plus the estimate to first order
    restored:         (cell - unedited) / (clean - unedited)
    placebo, seeds:   the metric of each cell with values of other samples, with other seeds: [n, *cells]
    exact_samples:    [*cells, samples]
    unedited, clean:  the metric without the hook, and in the run to compare with; the mean over samples
    unedited_samples, clean_samples: [samples]
    circuit:          [sizes] the faithfulness of the strongest cells: (metric - replaced) / (unedited - replaced)
                      where all other cells are replaced
    circuit_chance:   [chance, sizes] that of random sets of the same sizes
    replaced:         the metric with all cells replaced

    axes:    name of an axis of `exact` -> its labels
    sizes:   how many cells each circuit keeps
    samples: the number of each sample
    faults:  cells in which the metric of a sample is not finite, as lines of text
    about:   hook, metric, split
    folder:  the run directory from which they were read; None: they were not
    """

    folder: Path | None = None

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        axes: Mapping[str, Sequence[Any]],
        samples: Sequence[int],
        about: Mapping[str, str],
        faults: Sequence[str] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        super().__init__("tensor", "the effects", tensors)
        self.faults = faults
        self.sizes = list(sizes)
        self.axes = {name: list(labels) for name, labels in axes.items()}
        self.samples, self.about = list(samples), dict(about)

    def _view(self) -> html.View:
        values = self.main.flatten()
        changes = self.main_changes.flatten()
        ranked = self.ranked()
        sites = self.sites()
        rows: list[list[str | float]] = []
        for at in ranked[: html.MOST_ROWS]:
            rows.append([*map(str, sites[at].values()), float(values[at]), float(changes[at])])
        heads = (*self.axes, self.about.get("metric", ""), "change")
        title = f"effects of {self.about.get('hook')}: {self.strongest()}"
        return html.View(title, heads, rows, len(ranked))

    def with_circuit(
        self, sizes: Sequence[int], tensors: Mapping[str, Tensor], faults: Iterable[str]
    ) -> Effects:
        """The effects with those of circuits that keep so many cells; a fault says if there is no faithfulness."""
        lines = [*self.faults, *faults]
        replaced = float(tensors[REPLACED])
        if not is_change(self.unedited, replaced):
            lines.append(
                f"circuit: without a value, since {self.about.get('metric')} is {self.unedited:.6g} without the hook "
                f"and {replaced:.6g} with all cells replaced"
            )
        return Effects({**self, **tensors}, self.axes, self.samples, self.about, lines, sizes)

    @property
    def main(self) -> Tensor:
        """The exact values; without them, the estimate."""
        return self[EXACT] if EXACT in self else self[GRADIENT]

    def sites(self) -> list[dict[str, Any]]:
        """Axis -> label for each cell, in the order of the axes."""
        return [dict(zip(self.axes, labels, strict=True)) for labels in product(*self.axes.values())]

    def names(self) -> list[str]:
        """``module=relu1, heads=0`` for each cell, in the order of the axes."""
        return list(map(_name_of, self.sites()))

    def of_cells(self) -> dict[str, float]:
        """``exact module=relu1, heads=0`` -> its value, for each cell that has one; also gradient and restored."""
        numbers: dict[str, float] = {}
        for name in _OF_A_CELL:
            if name in self:
                for cell, value in zip(self.names(), self[name].flatten().tolist(), strict=True):
                    if not math.isnan(value):
                        numbers[f"{name} {cell}"] = value
        return numbers

    @property
    def unedited(self) -> float:
        """The metric without the hook, the mean over samples."""
        return float(self[PLAIN])

    def changes(self, name: str) -> Tensor:
        """A tensor of metrics, such as `exact` or `gradient`, minus the metric without the hook; float64."""
        return self[name].double() - self.unedited

    @property
    def main_changes(self) -> Tensor:
        """[*cells] float64: what the hook changes of the metric in each cell; without exact values, the estimate."""
        return self.main.double() - self.unedited

    def ranked(self) -> list[int]:
        """The numbers of the cells with a finite value, those in which the hook changes the metric most first."""
        sizes = self.main_changes.flatten().abs()
        finite = sizes.isfinite().nonzero().flatten()
        ranked: list[int] = finite[sizes[finite].argsort(descending=True, stable=True)].tolist()
        return ranked

    def by_strength(self) -> list[int]:
        """The numbers of all cells, those first that a circuit keeps first: with the largest |estimate - unedited|.

        Without estimates it is |exact - unedited|. Of equal cells the first one in the order of the axes comes first.
        """
        changes = self.changes(GRADIENT if GRADIENT in self else EXACT).flatten().abs()
        order: list[int] = changes.nan_to_num(-1.0).argsort(descending=True, stable=True).tolist()
        return order

    def largest(self) -> LargestEffect | None:
        """The cell with the largest effect; None if no cell has a finite one."""
        ranked = self.ranked()
        if not ranked:
            return None
        changes = self.main_changes.flatten()
        sizes = changes[ranked].abs()
        rounding = _ROUNDING * (abs(self.unedited) + float(sizes[0]))
        equal = int((sizes >= sizes[0] - rounding).sum())
        first = min(ranked[:equal])
        value = float(self.main.flatten()[first])
        return LargestEffect(first, self.sites()[first], value, float(changes[first]), equal - 1)

    def strongest(self) -> str:
        """A line about the cell with the largest effect."""
        metric = self.about.get("metric")
        plain = f"without the hook {self.unedited:.4g}"
        largest = self.largest()
        if largest is None:
            return f"largest effect: {metric} is not finite in any cell, {plain}"
        return f"largest effect: {largest.cell}: {metric} {largest.value:.4g}, {plain}{largest.tied}"

    def circuits(self) -> list[dict[str, Any]]:
        """A row for each size of a circuit: its faithfulness, and the mean of that of random sets."""
        rows: list[dict[str, Any]] = []
        for place, size in enumerate(self.sizes):
            row = {"size": size, "faithfulness": float(self[CIRCUIT][place])}
            if CHANCE in self:
                row["chance"] = float(self[CHANCE][:, place].mean())
            rows.append(row)
        return rows

    def faithfulness(self) -> list[str]:
        """A line about circuits; none if there are none."""
        texts: list[str] = []
        for row in self.circuits():
            text = f"{row['faithfulness']:.4g} with {counted(row['size'], 'cell')}"
            if "chance" in row:
                text += f" (random sets {row['chance']:.4g})"
            texts.append(text)
        return [f"circuit: faithfulness {', '.join(texts)}"] if texts else []

    def plot(self) -> Any:
        """The maps of the page: notebooks show them, `save` writes them into a file. HookrunError without any."""
        return ask_report("plot_of_study", self.folder, "effects", f"the effects of {self.about.get('hook')}")

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each cell that was computed: its labels, then the numbers of effects.csv; None: not computed."""
        columns = {name: self[name].flatten().tolist() for name in _OF_A_CELL if name in self}
        if PLACEBO in self:
            columns["placebo_mean"] = self[PLACEBO].mean(0).flatten().tolist()
            columns["placebo_std"] = self[PLACEBO].std(0, correction=0).flatten().tolist()
        # a site that does not exist has no number at all
        exists = ~(self.main.isnan() & self.get(GRADIENT, self.main).isnan())
        if OF_SAMPLES in self:
            exists |= ~self[OF_SAMPLES].isnan().all(-1)
        sites = self.sites()
        for at in exists.flatten().nonzero().flatten().tolist():
            row = sites[at]
            for name in _NUMBERS:
                row[name] = columns[name][at] if name in columns else None
            yield row


def write_effects(folder: Path, effects: Effects) -> None:
    """Write both files into the run directory; `dims` of the metadata names the dimensions of each tensor."""
    from hookrun.studies.kit.files import encode, replacing, write_table, write_tensors

    dims: dict[str, list[str] | None] = {}
    for name in effects:
        repeats = "chance" if name == CHANCE else name
        dims[name] = _dimensions(name, list(effects.axes), SAMPLES, SIZES, repeats)
    metadata = {
        **effects.about,
        "axes": encode(effects.axes),
        "samples": encode(effects.samples),
        "faults": encode(effects.faults),
        "sizes": encode(effects.sizes),
        "dims": encode(dims),
    }
    with replacing(folder / EFFECTS) as file:
        write_tensors(file, dict(effects), metadata)
    rows = [cell.values() for cell in effects.cells()]
    write_table(folder / EFFECTS_TABLE, [(*effects.axes, *_NUMBERS), *rows])


def _dimensions(name: str, cells: Sequence[T], samples: T, sizes: T, repeats: T) -> list[T] | None:
    """What stands for each dimension of a tensor; None: the effects have none of this name.

    cells: for the axes of the grid; sizes: for those of circuits; repeats: for what is computed several times
    """
    forms = {name: [*cells] for name in _OF_A_CELL}
    forms |= {name: [repeats, *cells] for name in _REPEATED}
    forms[OF_SAMPLES] = [*cells, samples]
    forms |= {name: [samples] for name in (PLAIN_OF_SAMPLES, CLEAN_OF_SAMPLES)}
    forms |= {CIRCUIT: [sizes], CHANCE: [repeats, sizes]}
    forms |= {name: [] for name in (PLAIN, CLEAN, REPLACED)}
    return forms.get(name)


def read_effects(folder: Path) -> Effects | None:
    """The effects of a run directory; None if it has none. StoreError if the file is broken."""
    from hookrun.studies.kit.files import StoreError, decode, read_tensors

    path = folder / EFFECTS
    if not os.path.lexists(path):
        return None
    tensors, about = read_tensors(path, folder)
    try:
        axes = decode(about.pop("axes").encode())
        samples = decode(about.pop("samples").encode())
        faults = [str(line) for line in decode(about.pop("faults", "[]").encode())]
        kept = decode(about.pop(SIZES, "[]").encode())
        about.pop("dims", None)
        sizes = [len(labels) for labels in axes.values()]
        for name, tensor in tensors.items():
            _require_form(name, tensor, _dimensions(name, sizes, len(samples), len(kept), None))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise StoreError(f"{path} does not describe its axes: {error}") from error
    effects = Effects(tensors, axes, samples, about, faults, kept)
    effects.folder = folder
    return effects


def _require_form(name: str, tensor: Tensor, expected: Sequence[int | None] | None) -> None:
    """Raise ValueError if a tensor of a known name does not have the form that it should have.

    expected: its shape, in which None is any size; None: any shape
    """
    if expected is None:
        return
    shape = list(tensor.shape)
    sizes = [size for size in expected if size is not None]
    if len(shape) != len(expected) or shape[len(shape) - len(sizes) :] != sizes:
        raise ValueError(f"{name} has shape {shape} for axes of {sizes}")
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise ValueError(f"{name} is {tensor.dtype}, expected floating point")


def effects_of(run: Run) -> Effects:
    """`Run.effects`. StoreError if the run has no effects."""
    from hookrun.studies.kit.files import StoreError

    effects = read_effects(run.path)
    if effects is None:
        raise StoreError(f"{run.path} has no effects: they are written by task=effects")
    return effects


def numbers_to_compare(run: Run) -> dict[str, float]:
    """The value of each cell, by which two runs are compared."""
    effects = read_effects(run.path)
    return {} if effects is None else effects.of_cells()


def answer_of(run: Run) -> dict[str, Any] | None:
    """The largest effect, how many other sites have one as large, and the faithfulness of circuits."""
    effects = read_effects(run.path)
    largest = None if effects is None else effects.largest()
    if effects is None or largest is None:
        return None
    answer: dict[str, Any] = {
        "what": "largest_effect",
        "hook": effects.about.get("hook"),
        "metric": effects.about.get("metric"),
        "site": largest.site,
        "value": largest.value,
        "unedited": effects.unedited,
        "change": largest.change,
        "ties": largest.ties,
    }
    if effects.sizes:
        answer["circuit"] = effects.circuits()
    return answer

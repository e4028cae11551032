"""`task.circuit`: the strongest cells of a grid are kept, all others are replaced, and what that leaves of the metric.

Imports no torch at module level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from hookrun.engine.actions import values as action_values
from hookrun.engine.spec import HookSpec
from hookrun.engine.validation import Section
from hookrun.errors import Problem, counted, listed
from hookrun.studies.effects.over import PLACES, WHERE, Over, listed_if_one
from hookrun.studies.effects.records import CHANCE, CIRCUIT, REPLACED, is_change

if TYPE_CHECKING:
    from torch import Tensor

REST = "task.circuit.rest"
MOST_SETS = 1_000


def _paired(raw: Any) -> Any:
    """A value of another run is that of the same sample, unless the mapping says otherwise.

    The capture may be left out: it is found in the run.
    """
    if isinstance(raw, Mapping) and "run" in raw:
        return {"capture": "", "sample": "same", **raw}
    return raw


class Circuit(Section):
    """Keeps the strongest cells of the grid, and replaces all others.

    sizes:  how many cells are kept; 0: none
    rest:   what the others are replaced with: {run: R}, the value of the same sample there; or another `value` of the
            action replace that is the same in each pass
    chance: how many random sets of each size are computed beside
    """

    sizes: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, le=10**9)], ...],
        BeforeValidator(listed_if_one),
        Field(min_length=1, max_length=MOST_SETS),
    ]
    rest: Annotated[action_values.Value, BeforeValidator(_paired)]
    chance: Annotated[int, Field(strict=True, ge=0, le=MOST_SETS)] = 0

    @property
    def runs(self) -> dict[str, str]:
        """Key path -> name of each run that `rest` comes from."""
        runs: dict[str, str] = {}
        for depth, part in enumerate(action_values.parts_of(self.rest)):
            if isinstance(part, action_values.RunValue):
                runs[f"{REST}{'.minus' * depth}.run"] = part.run
        return runs

    def problems(self, over: Over, hook: HookSpec) -> Iterator[Problem]:
        """Why the cells of this grid cannot be replaced together, as far as it is seen without the model."""
        for key in over:
            if key not in PLACES:
                what = f"a circuit replaces places, and cells that differ in {key} only are at the same place"
                hint = f"leave {key} or the circuit out"
                if key == "experts":
                    hint += "; if each expert is a module, select them and move the hook over {module: each}"
                yield Problem(f"{WHERE}.{key}", what, hint)
        varying = action_values.Ramp | action_values.PassValue | action_values.InlineFunction
        if isinstance(self.rest, varying) or action_values.is_drawn(self.rest):
            what = "the value is not the same in each pass"
            yield Problem(REST, what, "use {run: R}, a number, or a tensor of a file")
        if hook.keys.when.probability < 1 or hook.keys.when.value is not None:
            what = (
                "a circuit replaces the same elements in each pass, and these depend on chance or on values"
            )
            yield Problem(f"{hook.where}.when", what, "leave `probability` and `value` out")

    def size_problems(self, cells: int) -> Iterator[Problem]:
        """The sizes that are larger than the grid."""
        for place, size in enumerate(self.sizes):
            if size > cells:
                what = f"{size:,} cells cannot be kept: the grid has {cells:,}"
                yield Problem(f"task.circuit.sizes.{place}", what, f"give at most {cells:,}")

    def most_sets(self, cells: int) -> int:
        """How many different sets of cells are kept at most, besides all cells."""
        between = set(self.sizes) - {0, cells}
        return len(between) * (1 + self.chance) + 1

    def lines(self, cells: int, rest: Any, paths: Sequence[str]) -> Iterator[str]:
        """What is computed, for the plan. paths: the modules whose outputs are replaced"""
        sizes = ", ".join(map(str, self.sizes))
        beside = f", beside {counted(self.chance, 'random set')} of each size" if self.chance else ""
        yield (
            f"circuit: the strongest {sizes} are kept, all others replaced with {rest}{beside}: at most "
            f"{counted(self.most_sets(cells), 'set')} in a second pass over the samples; an element of several cells "
            "is replaced unless all of these are kept"
        )
        holders = [path or "(root)" for path in paths if _holds_any(path, paths)]
        if holders:
            yield (
                f"circuit: other modules of the grid are inside {listed(holders)}, and change nothing in sets that do "
                "not keep this too: move the hook over one level of modules if that is not meant"
            )


def _holds_any(path: str, others: Sequence[str]) -> bool:
    """Whether one of the others is inside the module."""
    inside = f"{path}." if path else ""
    return any(other != path and other.startswith(inside) for other in others)


@dataclass(frozen=True)
class KeptCells:
    """A pass in which some cells are kept and all others replaced.

    cells: their numbers
    """

    kind: ClassVar[str] = "circuit"
    cells: frozenset[int]


class Sets:
    """The sets of cells that are kept: for each size the strongest ones, then those of each random order.

    trials: one for each different set, and one that keeps no cell; to keep all is the pass without the hook

    order: the numbers of all cells, the strongest first
    """

    def __init__(self, circuit: Circuit, order: Sequence[int], seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        orders = [order]
        for _ in range(circuit.chance):
            orders.append(torch.randperm(len(order), generator=generator).tolist())
        self._all = frozenset(order)
        self._sets = [[frozenset(cells[:size]) for size in circuit.sizes] for cells in orders]
        different = {frozenset[int](): None}
        for sets in self._sets:
            different |= dict.fromkeys(sets)
        different.pop(self._all, None)
        self.trials = [KeptCells(cells) for cells in different]

    def results(self, metric: Tensor, unedited: float) -> dict[str, Tensor]:
        """The faithfulness of the strongest cells and of the random sets, and the metric with all cells replaced.

        metric: of each trial
        """
        import torch

        of_cells = {self._all: unedited}
        for trial, value in zip(self.trials, metric.tolist(), strict=True):
            of_cells[trial.cells] = value
        replaced = of_cells[frozenset()]
        of_sets = torch.tensor(
            [[of_cells[cells] for cells in sets] for sets in self._sets], dtype=torch.float64
        )
        faithful = (of_sets - replaced) / (unedited - replaced) + 0.0  # no -0.0
        if not is_change(unedited, replaced):
            faithful = torch.full_like(of_sets, torch.nan)
        results = {CIRCUIT: faithful[0], REPLACED: torch.tensor(replaced, dtype=torch.float64)}
        if len(faithful) > 1:
            results[CHANCE] = faithful[1:]
        return results

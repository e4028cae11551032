"""From the values of all jobs to the tensors of effects.safetensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookrun.data import Split
from hookrun.store.effects import (
    CLEAN,
    CLEAN_OF_SAMPLES,
    EXACT,
    GRADIENT,
    OF_SAMPLES,
    PLACEBO,
    PLAIN,
    PLAIN_OF_SAMPLES,
    RESTORED,
    SEEDS,
    Effects,
)
from hookrun.tasks.effects.cells import Cells
from hookrun.tasks.effects.moved import Job
from hookrun.tasks.effects.prepared import PreparedEffects


def effects_of(prepared: PreparedEffects, cells: Cells, split: Split) -> Effects:
    """The means over samples, in the order of the axes."""
    grid = prepared.grid

    def placed(jobs: Sequence[Job], values: Tensor, kind: str) -> Tensor:
        """[repeats, *cells, samples]; NaN where there is no job."""
        repeats = 1 + max((job.number for job in jobs if job.kind == kind), default=-1)
        whole = torch.full((repeats, *grid.sizes, values.shape[-1]), torch.nan, dtype=torch.float64)
        for job, row in zip(jobs, values, strict=True):
            if job.kind == kind:
                whole[job.number, *grid.cells[job.cell].place] = row
        return whole

    plain = cells.plain.nanmean()
    tensors = {PLAIN: plain, PLAIN_OF_SAMPLES: cells.plain}
    if prepared.jobs:
        exact = placed(prepared.jobs, cells.values, EXACT)
        of_seeds = exact.nanmean(-1)
        tensors |= {EXACT: of_seeds.mean(0), OF_SAMPLES: exact.mean(0)}
        tensors |= {SEEDS: of_seeds} if len(of_seeds) > 1 else {}
    placebo = placed(prepared.jobs, cells.values, PLACEBO)
    tensors |= {PLACEBO: placebo.nanmean(-1)} if len(placebo) else {}
    if prepared.estimated:
        changes = placed(prepared.estimated, cells.estimates, EXACT).nanmean(-1)
        tensors[GRADIENT] = cells.plain.nanmean() + changes.mean(0)
    if cells.compares:
        clean = cells.clean.nanmean()
        tensors |= {
            RESTORED: (tensors[EXACT] - plain) / (clean - plain),
            CLEAN: clean,
            CLEAN_OF_SAMPLES: cells.clean,
        }
    about = {"hook": prepared.moved.name, "metric": prepared.metrics[0].name, "split": split}
    return Effects(tensors, grid.labels, range(len(cells.plain)), about)


def strongest(effects: Effects) -> str:
    """A line about the cell with the largest effect."""
    values = effects[EXACT] if EXACT in effects else effects[GRADIENT]
    plain = float(effects[PLAIN])
    place = torch.unravel_index((values - plain).abs().nan_to_num(-1.0).argmax(), values.shape)
    labels = zip(effects.axes.items(), place, strict=True)
    cell = ", ".join(f"{key} {labels_of[int(at)]}" for (key, labels_of), at in labels)
    of = f"{effects.about['metric']} {float(values[place]):.4g}, without the hook {plain:.4g}"
    return f"largest effect: {cell}: {of}"

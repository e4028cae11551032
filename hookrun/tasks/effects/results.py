"""From the values of all jobs to the tensors of effects.safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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

if TYPE_CHECKING:
    from hookrun.tasks.effects import EffectsTask


def effects_of(task: EffectsTask, prepared: PreparedEffects, cells: Cells) -> Effects:
    """The means over samples, in the order of the axes."""
    metric, grid = prepared.metrics[0], prepared.grid

    def shown(values: Tensor) -> Tensor:
        return values.clone().apply_(metric.shown)

    def placed(jobs: Sequence[Job], values: Tensor, kind: str, repeats: int) -> Tensor:
        """[repeats, *cells, samples]; NaN where there is no job."""
        whole = torch.full((repeats, *grid.sizes, values.shape[-1]), torch.nan, dtype=torch.float64)
        for job, row in zip(jobs, values, strict=True):
            if job.kind == kind:
                whole[job.number, *grid.cells[job.cell].place] = row
        return whole

    plain = shown(cells.plain.nanmean())
    tensors = {PLAIN: plain, PLAIN_OF_SAMPLES: shown(cells.plain)}
    if prepared.jobs:
        exact = placed(prepared.jobs, cells.values, EXACT, task.seeds)
        of_seeds = shown(exact.nanmean(-1))
        tensors |= {EXACT: of_seeds.mean(0), OF_SAMPLES: shown(exact).mean(0)}
        tensors |= {SEEDS: of_seeds} if task.seeds > 1 else {}
    if task.placebo:
        tensors[PLACEBO] = shown(placed(prepared.jobs, cells.values, PLACEBO, task.placebo).nanmean(-1))
    if prepared.estimated:
        changes = placed(prepared.estimated, cells.estimates, EXACT, task.seeds).nanmean(-1)
        tensors[GRADIENT] = shown(cells.plain.nanmean() + changes).mean(0)
    if task.against is not None:
        clean = shown(cells.clean.nanmean())
        tensors |= {
            RESTORED: (tensors[EXACT] - plain) / (clean - plain),
            CLEAN: clean,
            CLEAN_OF_SAMPLES: shown(cells.clean),
        }
    about = {"hook": str(task.hook), "metric": metric.name, "split": task.split}
    return Effects(tensors, grid.labels, range(len(cells.plain)), about)

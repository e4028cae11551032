"""The user's own code that a run uses in addition to its hooks, for the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hookrun.callables import Code
from hookrun.spec import Settings
from hookrun.tasks.loop.losses import WHERE as LOSS
from hookrun.tasks.loop.losses import TrainLoss
from hookrun.tasks.loop.metrics import WHERE as METRICS
from hookrun.tasks.loop.metrics import Metric
from hookrun.trusted import DATA, MODELS, OPTIMIZERS, SCHEDULERS, Kind, load


def own_code(
    settings: Settings, loss: TrainLoss, metrics: Sequence[Metric], *, trains: bool
) -> dict[str, Code]:
    """Key path -> its code, for everything that is loaded by name from a trusted package.

    trains: include the optimizer and its schedule
    """
    found = {where: load(text, kind, where).code for where, text, kind in _factories(settings)}
    if loss.code is not None:
        found[LOSS] = loss.code
    found |= {f"{METRICS}.{each.name}": each.code for each in metrics if each.code is not None}
    train = settings.train
    for where, named, kind in (
        ("train.optimizer.name", train.optimizer, OPTIMIZERS),
        ("train.scheduler.name", train.scheduler, SCHEDULERS),
    ):
        if trains and named is not None and ":" in named.name:
            found[where] = load(named.name, kind, where).code
    return found


def _factories(settings: Settings) -> Iterator[tuple[str, str, Kind]]:
    if settings.model.factory is not None:
        yield "model.factory", settings.model.factory, MODELS
    if settings.data.factory is not None:
        yield "data.factory", settings.data.factory, DATA

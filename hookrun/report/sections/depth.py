"""Statistics by depth: of each job of a sweep a line over the hooked modules, in the model's order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from hookrun.engine.actions.base import ABOUT
from hookrun.errors import shortened
from hookrun.report.curves import MOST_OPEN, Record, charts, is_measured, open_curves
from hookrun.report.draw.charts import Figure, Series, spans_magnitudes
from hookrun.report.draw.text import module_name
from hookrun.report.facts import HookLine
from hookrun.report.lines import last_records, numbers
from hookrun.report.sections import swept
from hookrun.report.sweep_facts import JobData, SweepData
from hookrun.store.files import StoreError
from hookrun.store.format import PLAN, STATS
from hookrun.store.records import PlanRecord, typed_record

MOST_JOBS = 40
MOST_BYTES = 2**19
"""Bytes read at the end of a job's stats.jsonl."""
MOST_STATISTICS = 24
MOST_MODULES = 400

Statistic = tuple[str, str, str]
"""Hook, statistic and mode."""


@dataclass
class Depths:
    """What the jobs recorded.

    order:  hook -> its modules or parameters, in the model's order
    values: statistic -> the job's label -> module -> mean over the last recorded epoch
    """

    order: dict[str, dict[str, None]] = field(default_factory=dict)
    values: dict[Statistic, dict[str, dict[str, float]]] = field(default_factory=dict)

    def add(self, label: str, folder: Path) -> None:
        """Add the end of what a job recorded."""
        records = list(filter(is_measured, last_records(folder / STATS, HookLine, MOST_BYTES)))
        if not records:
            return
        try:
            plan = typed_record(folder / PLAN, PlanRecord)
        except StoreError:  # the order is then that of the records
            plan = PlanRecord()
        for hook in plan.hooks:
            self.order.setdefault(hook.name, {}).update((match.path, None) for match in hook.targets)
        for record in records:
            self.order.setdefault(record["hook"], {}).setdefault(record["module"])
        for statistic, by_module in _last_means(records).items():
            self.values.setdefault(statistic, {})[label] = by_module


def _last_means(records: Iterable[Record]) -> dict[Statistic, dict[str, float]]:
    """Statistic -> module -> mean of its finite values in the last epoch."""
    found = dict[Statistic, dict[str, tuple[int, list[float]]]]()
    for record in records:
        for name, value in numbers(record, ABOUT).items():
            by_module = found.setdefault((record["hook"], name, record["mode"]), {})
            epoch, values = by_module.get(record["module"], (-1, []))
            if record["epoch"] > epoch:
                values = []
                by_module[record["module"]] = record["epoch"], values
            if math.isfinite(value):
                values.append(value)
    means = dict[Statistic, dict[str, float]]()
    for statistic, by_module in found.items():
        means[statistic] = {path: float(np.mean(values)) for path, (_, values) in by_module.items() if values}
    return means


def build(facts: SweepData) -> list[tuple[str, list[Figure]]]:
    """The title and the charts of each statistic that at least two modules have."""
    depths = Depths()
    labels = set[str]()
    for job in facts.ranked[:MOST_JOBS]:
        label = _label(facts, job)
        if label in labels:
            label += f", job {job.name}"
        labels.add(label)
        depths.add(label, facts.folder / job.name)
    if not depths.values:
        return []
    beside = [*swept.figures(facts, are_few=True), *swept.figures(facts, are_few=False)]
    room = max(MOST_OPEN - open_curves(beside), 1)
    modes = {mode for _, _, mode in depths.values}
    hooks = {hook for hook, _, _ in depths.values}
    drawn = list[tuple[str, list[Figure]]]()
    for (hook, name, mode), by_job in depths.values.items():
        measured = set(chain.from_iterable(by_job.values()))
        modules = [path for path in depths.order[hook] if path in measured][:MOST_MODULES]
        title = f"{name} by depth"
        if len(hooks) > 1:
            title += f", {shortened(hook, 40)}"
        if len(modes) > 1:
            title += f", {mode} mode"
        if len(modules) > 1:
            drawn.append((title, list(_charts(title, name, by_job, modules, room))))
    return drawn[:MOST_STATISTICS]


def _charts(
    title: str, name: str, by_job: Mapping[str, Mapping[str, float]], modules: Sequence[str], room: int
) -> Iterator[Figure]:
    """Charts with a line for each job, those of the best jobs first; beyond `room` lines they are folded."""
    curves = list[Series]()
    for label, values in by_job.items():
        places = [place for place, path in enumerate(modules) if path in values]
        curves.append(Series(label, places, [values[modules[place]] for place in places]))
    log = spans_magnitudes(chain.from_iterable(curve.y for curve in curves))
    drawing = partial(charts, curves, title=title, y=name, noun="job", note="the best jobs come first")
    drawing = partial(drawing, x="module", log=log, labels=list(map(module_name, modules)))
    last = min(room, len(curves))
    yield from drawing(0, last)
    for figure in drawing(last, len(curves)):
        yield replace(figure, folded=True)


def _label(facts: SweepData, job: JobData) -> str:
    """What was swept, as this job has it: ``lr=0.1 seed=0``; of a baseline also that it is one."""
    if job in facts.baselines:
        return f"baseline {job.name}"
    given = [f"{key.rpartition('.')[2]}={job.given(key)}" for key in facts.varied or facts.swept]
    return shortened(" ".join(given) or job.name, 60)

"""Statistics by depth: of each job of a sweep a line over the hooked modules, in the model's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from hookrun.engine.actions.base import ABOUT
from hookrun.errors import shortened
from hookrun.report.curves import MOST_OPEN, charts, curves_in, fold, is_measured
from hookrun.report.draw.charts import Figure, Series
from hookrun.report.draw.text import module_name
from hookrun.report.facts import HookLine
from hookrun.report.lines import last_records, numbers
from hookrun.report.sections import swept
from hookrun.report.sweep_facts import SweepData, record_in
from hookrun.store.format import PLAN, STATS
from hookrun.store.records import PlanRecord

MOST_JOBS = 40
MOST_BYTES = 2**19
"""Bytes read at the end of a job's stats.jsonl."""
MOST_STATISTICS = 24
MOST_MODULES = 400

Statistic = tuple[str, str, str]
"""Hook, mode and name."""


def build(facts: SweepData) -> list[tuple[str, list[Figure]]]:
    """The title and the charts of each statistic that at least two modules have."""
    order = dict[str, dict[str, None]]()
    found = dict[Statistic, dict[str, dict[str, float]]]()
    for job in facts.ranked[:MOST_JOBS]:
        folder = facts.folder / job.name
        plan = PlanRecord.model_validate(record_in(folder / PLAN, PlanRecord))
        for hook in plan.hooks:
            order.setdefault(hook.name, {}).update((match.path, None) for match in hook.targets)
        given = " ".join(f"{key.rpartition('.')[2]}={job.given(key)}" for key in facts.varied)
        for statistic, means in _last_means(folder).items():
            order.setdefault(statistic[0], {}).update(dict.fromkeys(means))
            found.setdefault(statistic, {})[shortened(f"{job.name}: {given}", 60)] = means
    room = MOST_OPEN - curves_in(chain(*(swept.figures(facts, are_few=few) for few in (True, False))))
    drawn = list[tuple[str, list[Figure]]]()
    for (hook_name, mode, name), by_job in found.items():
        measured = set(chain.from_iterable(by_job.values()))
        modules = [path for path in order[hook_name] if path in measured]
        if len(modules) > 1:
            title = f"{name} by depth, {shortened(hook_name, 40)}, {mode} mode"
            drawn.append((title, _charts(title, name, by_job, modules[:MOST_MODULES], room)))
    return drawn[:MOST_STATISTICS]


@np.errstate(over="ignore", invalid="ignore")
def _last_means(folder: Path) -> dict[Statistic, dict[str, float]]:
    """Statistic -> module -> its mean over the last epoch that a job recorded."""
    values = dict[Statistic, dict[str, list[float]]]()
    records = list(filter(is_measured, last_records(folder / STATS, HookLine, MOST_BYTES)))
    for record in records:
        if record["epoch"] == records[-1]["epoch"]:
            for name, value in numbers(record, ABOUT).items():
                of_module = values.setdefault((record["hook"], record["mode"], name), {})
                of_module.setdefault(record["module"], []).append(float(value))
    means = dict[Statistic, dict[str, float]]()
    for statistic, by_module in values.items():
        means[statistic] = {path: float(np.mean(of)) for path, of in by_module.items()}
    return means


def _charts(
    title: str, name: str, by_job: Mapping[str, Mapping[str, float]], modules: Sequence[str], room: int
) -> list[Figure]:
    """Charts with a line for each job, the best ones first; beyond `room` lines they are folded."""
    curves = list[Series]()
    for label, means in by_job.items():
        places = [place for place, path in enumerate(modules) if path in means]
        curves.append(Series(label, places, [means[modules[place]] for place in places]))
    names = list(map(module_name, modules))
    order = "the best jobs come first"
    drawn = charts(title, curves, len(curves), x="module", y=name, noun="job", order=order, labels=names)
    return fold(drawn, room)

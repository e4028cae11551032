"""Statistics by depth: of each job of a sweep a line over the hooked modules, in the model's order."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import numpy as np

from hookrun.errors import shortened
from hookrun.report.curves import Statistic, charts, fold, is_measured, statistics_in
from hookrun.report.draw.charts import COLOURS, Figure, Series
from hookrun.report.draw.text import module_name
from hookrun.report.facts import HookLine
from hookrun.report.lines import is_number, last_records
from hookrun.report.sweep_facts import SweepData, record_in
from hookrun.store.format import PLAN, STATS
from hookrun.store.records import PlanRecord, grouped

MOST_JOBS = 40
MOST_BYTES = 2**19
"""Bytes read at the end of a job's stats.jsonl."""
MOST_STATISTICS = 24


@np.errstate(over="ignore", invalid="ignore")
def build(facts: SweepData) -> list[tuple[str, list[Figure]]]:
    """The title and the charts of each statistic that at least two modules have, of all jobs with these modules.

    The chart of the best jobs is open, those of the others are folded.
    """
    curves: dict[tuple[str, str, tuple[str, ...]], list[Series]] = {}
    for job in facts.ranked[:MOST_JOBS]:
        given = " ".join(f"{key.rpartition('.')[2]}={job.given(key)}" for key in facts.varied)
        label = shortened(f"{job.name}: {given}", 60)
        for hook, statistic in _of_last_epoch(facts.folder / job.name):
            means = [float(np.mean(values)) for _, values in statistic.modules.values()]
            title = f"{statistic.name} by depth, {shortened(hook, 40)}{statistic.suffix}"
            of_jobs = curves.setdefault((title, statistic.name, tuple(statistic.modules)), [])
            of_jobs.append(Series(label, range(len(means)), means))
    drawn: list[tuple[str, list[Figure]]] = []
    for (title, name, modules), of_jobs in curves.items():
        if len(modules) > 1:
            labels = list(map(module_name, modules))
            order = "the best jobs come first"
            figures = charts(title, of_jobs, x="module", y=name, noun="job", order=order, labels=labels)
            drawn.append((title, fold(figures, COLOURS)))
    return drawn[:MOST_STATISTICS]


def _of_last_epoch(folder: Path) -> Iterator[tuple[str, Statistic]]:
    """Each hook with each number that it recorded in the last epoch of a job."""
    plan = PlanRecord.model_validate(record_in(folder / PLAN, PlanRecord))
    targets = {hook.name: hook.targets for hook in plan.hooks}
    records = list(filter(is_measured, last_records(folder / STATS, HookLine, MOST_BYTES)))
    last = [record for record in records if record["epoch"] == records[-1]["epoch"]]
    for hook, of_hook in grouped(last, itemgetter("hook")).items():
        places = {match.path: place for place, match in enumerate(targets.get(hook, ()))}
        for statistic in statistics_in(of_hook, places, is_number):
            yield hook, statistic

"""The jobs of a sweep that ran without hooks (baselines), and the difference of the others to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hookrun.report.jobs import JobFacts
from hookrun.spec.objective import Goal


@dataclass(frozen=True)
class FromBaseline:
    """The difference between a job and its baseline.

    value:     the job's value minus the baseline's
    is_better: according to the goal; None if they are equal or there is no goal
    """

    value: float
    is_better: bool | None


def is_about_hooks(key: str) -> bool:
    """Whether an override of this key changes the hooks, or switches them off."""
    return re.split(r"[.@]", key.lstrip("~"))[0] in ("hooks", "hooked")


def baselines_among(jobs: Sequence[JobFacts]) -> list[JobFacts]:
    """The jobs whose overrides switch the hooks off; empty if all do."""
    found = [job for job in jobs if _is_baseline(job.overrides)]
    return found if len(found) < len(jobs) else []


def _is_baseline(overrides: Mapping[str, str]) -> bool:
    if "hooked" in overrides:
        return overrides["hooked"].lower() == "false"
    without = overrides.get("hooks") == "none" or "~hooks" in overrides
    return without and sum(map(is_about_hooks, overrides)) == 1


def baseline_of(job: JobFacts, baselines: Sequence[JobFacts], varied: Sequence[str]) -> JobFacts | None:
    """The baseline with the same overrides, apart from those of hooks; the only one if there is one. None: unknown.

    varied: the keys whose values differ from job to job
    """
    others = [key for key in varied if not is_about_hooks(key)]
    alike = [each for each in baselines if all(_same(each, job, key) for key in others)]
    if len(alike) == 1:
        return alike[0]
    return baselines[0] if len(baselines) == 1 else None


def _same(one: JobFacts, other: JobFacts, key: str) -> bool:
    return one.overrides.get(key) == other.overrides.get(key)


def difference(
    job: JobFacts, baseline: JobFacts | None, metric: str, goal: Goal | None
) -> FromBaseline | None:
    """The difference in the objective's value if `goal` is given, else in the metric's latest value; None: unknown."""
    if baseline is None or job is baseline:
        return None
    if goal is not None:
        mine, its = job.value, baseline.value
    else:
        mine, its = job.metrics.get(metric), baseline.metrics.get(metric)
    if mine is None or its is None:
        return None
    better = None if goal is None or mine == its else goal.is_better(mine, its)
    return FromBaseline(mine - its, better)

"""The jobs of a sweep that ran without hooks (baselines), and the difference of the others to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hookrun.report.jobs import JobFacts
from hookrun.spec.objective import Goal

WITHOUT_HOOKS = "hooks=none"
_HOOKS = "hooks"


@dataclass(frozen=True)
class FromBaseline:
    """The difference between a job and its baseline.

    value:     the job's value minus the baseline's
    is_better: according to the goal; None if they are equal or there is no goal
    """

    value: float
    is_better: bool | None


def is_about_hooks(key: str) -> bool:
    """Whether an override of this key changes the hooks."""
    return key.lstrip("~").split(".")[0].split("@")[0] == _HOOKS


def baselines_among(jobs: Sequence[JobFacts]) -> list[JobFacts]:
    """The jobs without hooks: requested as baselines, or equal to a job with hooks in all other keys.

    Empty if no job has hooks.
    """
    hooked = {job.without_hooks for job in jobs if job.has_hooks and job.without_hooks}
    found = [
        job for job in jobs if _is_typed(job) or (job.has_hooks is False and job.without_hooks in hooked)
    ]
    return found if len(found) < len(jobs) else []


def _is_typed(job: JobFacts) -> bool:
    """Whether the overrides of the job ask for no hook."""
    keys = [key for key in job.overrides if is_about_hooks(key)]
    return keys == [_HOOKS] and job.overrides[_HOOKS] == "none"


def baseline_of(job: JobFacts, baselines: Sequence[JobFacts], varied: Sequence[str]) -> JobFacts | None:
    """The baseline of a job: the same run without hooks, else the one with the same overrides apart from hooks.

    If jobs do not record which run they are without hooks, it is the only baseline. None if there is no such baseline.

    varied: the keys whose values differ from job to job
    """
    if job.without_hooks:
        for each in baselines:
            if each.without_hooks == job.without_hooks:
                return each
    others = [key for key in varied if not is_about_hooks(key)]
    alike = [each for each in baselines if all(_same(each, job, key) for key in others)]
    if len(alike) == 1:
        return alike[0]
    return baselines[0] if len(baselines) == 1 and not job.without_hooks else None


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

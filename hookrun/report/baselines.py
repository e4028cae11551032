"""The jobs of a sweep that ran without hooks, and how far the others are from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hookrun.report.jobs import JobFacts
from hookrun.spec.objective import Goal

WITHOUT_HOOKS = "hooks=none"
_HOOKS = "hooks"


@dataclass(frozen=True)
class FromBaseline:
    """How far a job is from its baseline.

    value:     the job's minus the baseline's
    is_better: by the goal; None where they are equal, or there is no goal
    """

    value: float
    is_better: bool | None


def is_about_hooks(key: str) -> bool:
    """Whether an override of this key changes the hooks."""
    return key.lstrip("~").split(".")[0].split("@")[0] == _HOOKS


def is_baseline(job: JobFacts) -> bool:
    """Whether the job was asked for without any hook."""
    keys = [key for key in job.overrides if is_about_hooks(key)]
    return keys == [_HOOKS] and job.overrides[_HOOKS] == "none"


def baseline_of(job: JobFacts, baselines: Sequence[JobFacts], varied: Sequence[str]) -> JobFacts | None:
    """The baseline that a job is compared with: that of the same other settings, else the only one; None: neither.

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
    """Of the objective's value where `goal` is given, else of the latest value of the metric; None: not known."""
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

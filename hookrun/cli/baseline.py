"""The runs without hooks that `baseline: true` adds to a sweep; the sweep's page compares the others with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from omegaconf import DictConfig, OmegaConf

from hookrun.cli.errors import explained
from hookrun.cli.hydra import App
from hookrun.cli.job_hash import JobHashes
from hookrun.errors import Problem, SpecError
from hookrun.report.baselines import WITHOUT_HOOKS

KEY = "baseline"
_HOOKS = "hooks"


def with_baselines(
    app: App, cfg: DictConfig, jobs: Sequence[list[str]], hashes: JobHashes
) -> list[list[str]]:
    """The overrides of the jobs of a sweep, preceded by those of its baselines where `baseline` is true.

    A baseline is an ordinary job with ``hooks=none`` in place of the job's overrides of hooks. Jobs that differ only
    in their hooks share one baseline, and none is added where the sweep already has that job without hooks.
    """
    compared = {tuple(job) for job in jobs if _is_compared(app, cfg, job)}
    if not compared:
        return list(jobs)
    existing, added = set[str](), dict[str, list[str]]()
    for job in jobs:
        try:
            record = hashes.record(job)
        except SpecError:  # `_validated` in sweep.py reports it with the other jobs' problems
            continue
        if not record["has_hooks"]:
            existing.add(record["without_hooks"])
        elif tuple(job) in compared:
            added.setdefault(record["without_hooks"], _without_hooks(job))
    return [*(overrides for run, overrides in added.items() if run not in existing), *jobs]


def of_baseline(error: SpecError) -> SpecError:
    """The problems of a baseline job, with hints that say that `baseline: true` added it."""
    return SpecError(
        [replace(each, hint="; ".join(filter(None, [_why(each), each.hint]))) for each in error.errors]
    )


def _why(problem: Problem) -> str:
    added = f"this job was added by `{KEY}: true`"
    reads_a_hook = "Interpolation" in problem.what and f"'{_HOOKS}." in problem.what
    return f"{added} and has no hooks; take the value from `vars`" if reads_a_hook else added


def refuse_baseline(cfg: DictConfig) -> None:
    """Raise SpecError where `baseline` is true for a sweep whose sweeper chooses the jobs while it runs."""
    if cfg.get(KEY) is True:
        what = "the sweeper of this sweep chooses its jobs as it goes, and a baseline is not one that it would choose"
        raise SpecError([Problem(KEY, what, f"run it beside the sweep: {WITHOUT_HOOKS}, without -m")])


def _is_compared(app: App, cfg: DictConfig, job: Sequence[str]) -> bool:
    """Whether `baseline` is true for a job. In a sweep over experiments, each experiment sets it itself."""
    typed = set(cast(list[str], OmegaConf.to_container(cfg.hydra.overrides.task)))  # applied to `cfg` already
    if cfg.get(KEY) is True or not any(
        _root(text) in ("experiment", KEY) and text not in typed for text in job
    ):
        return cfg.get(KEY) is True
    try:
        with explained():
            return app.job_config(cfg, list(job), 0).get(KEY) is True
    except SpecError:  # `_validated` in sweep.py reports it with the other jobs' problems
        return False


def _without_hooks(overrides: Sequence[str]) -> list[str]:
    kept = [text for text in overrides if _root(text) != _HOOKS]
    return [*kept, WITHOUT_HOOKS]


def _root(override: str) -> str:
    return re.split(r"[.@/=]", override.lstrip("+~"))[0]

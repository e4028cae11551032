"""The runs without hooks that `baseline: true` adds to a sweep, with which its page compares the others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from omegaconf import DictConfig

from hookrun.cli.compose import plain_job
from hookrun.cli.errors import explained
from hookrun.cli.hydra import App
from hookrun.errors import Problem, SpecError
from hookrun.report.baselines import WITHOUT_HOOKS

KEY = "baseline"
_HOOKS = "hooks"
_CHANGES_NOTHING = (_HOOKS, "vars", "tags", KEY)
"""Root keys in which two runs without hooks may differ and still be the same run."""


def with_baselines(app: App, cfg: DictConfig, jobs: Sequence[list[str]]) -> list[list[str]]:
    """The overrides of the jobs of a sweep, behind those of its baselines where `baseline` is true.

    A baseline is a job as the others are, with ``hooks=none`` in place of what they say of hooks: one for all jobs
    that differ in their hooks alone, and none where a job of the sweep has no hooks already.
    """
    compared = [job for job in jobs if _is_compared(app, cfg, job)]
    asked = dict.fromkeys(map(_without_hooks, compared))
    there = {_same(app, cfg, job) for job in jobs if tuple(job) in asked}
    added = dict[str, list[str]]()
    for overrides in asked:
        same = _same(app, cfg, overrides)
        if same not in there:
            added.setdefault(same, list(overrides))
    return [*added.values(), *jobs]


def refuse_baseline(cfg: DictConfig) -> None:
    """Raise SpecError for a sweep whose sweeper chooses the jobs as it goes."""
    if cfg.get(KEY) is True:
        what = "the sweeper of this sweep chooses its jobs as it goes, and a baseline is not one that it would choose"
        raise SpecError([Problem(KEY, what, f"run it beside the sweep: {WITHOUT_HOOKS}, without -m")])


def _is_compared(app: App, cfg: DictConfig, job: Sequence[str]) -> bool:
    """Whether `baseline` is true for a job: of a sweep over experiments, each says that for itself."""
    if cfg.get(KEY) is True or not any(_root(text) in ("experiment", KEY) for text in job):
        return cfg.get(KEY) is True
    try:
        with explained():
            return app.job_config(cfg, list(job), 0).get(KEY) is True
    except SpecError:  # told with what is wrong with the other jobs
        return False


def _without_hooks(overrides: Sequence[str]) -> tuple[str, ...]:
    kept = [text for text in overrides if _root(text) != _HOOKS]
    return (*kept, WITHOUT_HOOKS)


def _root(override: str) -> str:
    return re.split(r"[.@/=]", override.lstrip("+~"))[0]


def _same(app: App, cfg: DictConfig, overrides: Sequence[str]) -> str:
    """Equal for overrides that, without hooks, make the same run; what does not compose is told with the other jobs."""
    try:
        with explained():
            job = app.job_config(cfg, list(overrides), 0)
        config = {key: value for key, value in plain_job(job).items() if key not in _CHANGES_NOTHING}
    except SpecError:
        return json.dumps(list(overrides))
    return json.dumps(config, sort_keys=True, default=str)

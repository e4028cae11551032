"""The data of a sweep's directory for its report: its jobs, finished or not, the varied keys and the results.

Jobs that differ only in the keys of `objective.over`, such as the seed, are repetitions of one setting. The best
setting is the one with the best mean.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from hookrun.engine.keys import root_of
from hookrun.errors import counted
from hookrun.report.lines import is_kept, sampled
from hookrun.store.config import stored as stored_config
from hookrun.store.description import note_of, tags_of
from hookrun.store.files import StoreError, by_number
from hookrun.store.format import CONFIG, ENV, METRICS, MULTIRUN, OVERRIDES, REPORT, STATUS, SWEEP
from hookrun.store.objective import AVERAGED, DIAGNOSTIC, Direction, Goal, is_loss
from hookrun.store.records import (
    EnvRecord,
    MetricsLine,
    ObjectiveRecord,
    Record,
    Status,
    SweepRecord,
    grouped,
    read_record,
    typed_record,
)
from hookrun.store.run_dir import cut_off
from hookrun.store.runs import run_folders
from hookrun.store.scores import latest, result_of
from hookrun.store.summary import seconds_between

T = TypeVar("T", dict[str, Any], list[Any])

TAGS = "tags"
NOTE = "note"
_ENOUGH = 4 * 2**20  # bytes of one job's metrics.jsonl
MOST_OVERRIDES = 50_000
"""Longest command line, in characters, that is parsed."""

_NOT_WELL = ("cut off", "failed", "stopped", "interrupted", "unreadable")
_ORDER = ("running", *_NOT_WELL, "not started", "done")


@dataclass(frozen=True)
class JobData:
    """One job.

    name:      its directory, within the sweep's
    status:    of status.json; ``not started`` if there is none yet, ``cut off`` if its process does not exist any more
    overrides: key -> value, as they were given
    metrics:   ``split/name`` -> the latest value, of a whole pass if there is one
    of_batch:  the metrics that are of the last logged batch because there is no mean
    result:    the value of the job's objective; None if it has none
    objective: the section `objective` of its configuration, in its long form
    without_hooks: a hash of its configuration, as it is written, without what concerns hooks
    """

    name: str
    status: str
    reason: str
    exit_code: int | None
    started: str
    seconds: float | None
    overrides: dict[str, str]
    metrics: dict[str, float]
    of_batch: frozenset[str]
    result: ObjectiveRecord | None
    objective: Mapping[str, Any]
    env: EnvRecord
    has_report: bool
    without_hooks: int = 0

    @property
    def value(self) -> float | None:
        """Its value of the objective; None if it has no finite value."""
        return None if self.result is None else self.result.value

    def given(self, key: str) -> str:
        """The value that was given for a key; a dash if none was."""
        return self.overrides.get(key, "–")

    @property
    def link(self) -> str:
        """The address of its page, relative to the sweep's page."""
        return f"./{quote(self.name)}/{REPORT}"


def find_jobs(folder: Path) -> list[JobData]:
    """Every job below `folder`, by number."""
    folder = folder.resolve()
    jobs = [_job(folder, path) for path in run_folders(folder)]
    return sorted(jobs, key=lambda job: by_number(job.name))


def _job(folder: Path, path: Path) -> JobData:
    status = record_in(path / STATUS, Status)
    if reason := cut_off(status):
        status = {**status, "status": "cut off", "reason": reason}
    lines = sampled(path / METRICS, MetricsLine, limit=_ENOUGH, always=is_kept).records
    means, batches = latest(lines)
    values = {name: value for name, value in (batches | means).items() if not name.endswith("/lr")}
    config = read_yaml(path / CONFIG, path, dict)
    objective = config.get("objective")
    if isinstance(objective, str):
        objective = {"metric": objective}
    elif not isinstance(objective, dict):
        objective = {}
    seconds = None
    if not reason:
        seconds = seconds_between(status.get("started"), status.get("ended"))
    return JobData(
        name=path.relative_to(folder).as_posix(),
        status=str(status.get("status", "not started")),
        reason=str(status.get("reason") or ""),
        exit_code=status.get("exit_code"),
        started=str(status.get("started", "")),
        seconds=seconds,
        overrides=_overrides(path, config),
        metrics=values,
        of_batch=frozenset(values.keys() - means.keys()),
        result=result_of(status, lines) if status.get("status") == "done" else None,
        objective=objective,
        env=EnvRecord.model_validate(record_in(path / ENV, EnvRecord)),
        has_report=(path / REPORT).is_file(),
        without_hooks=hash(repr({key: value for key, value in config.items() if key not in ABOUT_HOOKS})),
    )


def _overrides(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Key -> value of the overrides that a job was started with, and its tags and note."""
    overrides: dict[str, str] = {}
    for text in read_yaml(path / OVERRIDES, path, list):
        key, _, value = str(text).lstrip("+").partition("=")
        overrides[key] = value
    tags = tags_of(config)
    if tags:
        overrides[TAGS] = ", ".join(tags)
    note = note_of(config)
    if note:
        overrides[NOTE] = note
    return overrides


def record_in(path: Path, model: type[Record]) -> dict[str, Any]:
    """The content of the file; empty if it does not exist or cannot be read, in which case a status says why."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_record(path, model)
    except StoreError as error:
        if path.name != STATUS:
            return {}
        return {"status": "unreadable", "reason": str(error)}


def read_yaml(path: Path, root: Path, kind: type[T]) -> T:
    """The content with unresolved interpolations; empty if the file is missing, is not YAML, or is of another kind.

    root: the directory of the run or the sweep, below which no link is followed
    kind: dict or list
    """
    try:
        content = stored_config.read_yaml(path, root)
    except StoreError:
        return kind()
    if not isinstance(content, kind):
        return kind()
    return content


@dataclass(frozen=True)
class Setting:
    """Jobs of a sweep that differ only in the keys of `objective.over`.

    values: varied key -> its value, as it was given; the keys of `objective.over` are left out
    """

    values: Mapping[str, str]
    jobs: Sequence[JobData]

    @property
    def result(self) -> tuple[float | None, float | None]:
        """Mean and standard deviation of the objective over the jobs that have a value; None if none has."""
        return spread(job.value for job in self.jobs)

    def of(self, metric: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation of a metric's latest values; None without a finite value."""
        return spread(job.metrics.get(metric) for job in self.jobs)


def spread(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (of a sample: n - 1) of the finite values; None of too few."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None, None
    mean = statistics.fmean(finite)
    if len(finite) == 1:
        return mean, None
    return mean, statistics.stdev(finite)


@dataclass(frozen=True)
class SweepData:
    """The data of one sweep's directory.

    swept: the keys that the sweep varies, from its start; empty if that is not known
    stopped_by: the job whose failure ended the sweep under `fail_fast`; "" if none did
    started_with: the number of jobs that the sweep recorded; 0 if it did not
    """

    folder: Path
    jobs: Sequence[JobData]
    swept: Sequence[str] = ()
    stopped_by: str = ""
    started_with: int = 0

    @cached_property
    def baselines(self) -> list[JobData]:
        """The jobs whose overrides switch the hooks off; empty if all do."""
        baselines = [job for job in self.jobs if _is_baseline(job.overrides)]
        if len(baselines) == len(self.jobs):
            return []
        return baselines

    @cached_property
    def compared(self) -> list[JobData]:
        """The jobs that are not baselines."""
        return [job for job in self.jobs if job not in self.baselines]

    @cached_property
    def goals(self) -> list[Goal]:
        """The goals of the jobs: one, unless jobs have different objectives."""
        results = [job.result for job in self.jobs if job.result is not None]
        return list(dict.fromkeys(result.goal for result in results))

    @property
    def goal(self) -> Goal | None:
        """The goal of all jobs; None if they have different ones, or none."""
        return self.goals[0] if len(self.goals) == 1 else None

    @cached_property
    def averaged(self) -> tuple[str, ...]:
        """The keys of `objective.over`, as the first job has them."""
        for job in self.jobs:
            over = job.objective.get("over")
            if isinstance(over, list):
                return tuple(map(str, over))
            if "over" in job.objective:
                return (str(over),)
        return AVERAGED

    @cached_property
    def settings(self) -> list[Setting]:
        """The settings of the jobs that are not baselines, from best to worst, then those without a value.

        Without a common goal, in the order of the jobs; of a diagnostic metric, by the size of the effect.
        """
        settings = self.settings_of(self.compared)
        if self.goal is not None:
            settings.sort(key=self.rank)
        return settings

    def settings_of(self, jobs: Iterable[JobData]) -> list[Setting]:
        """The settings of the jobs, in the order of the jobs."""
        keys = [key for key in self.varied if key not in self.averaged]
        settings: list[Setting] = []
        for values, of_setting in grouped(
            jobs, lambda job: tuple(self.given(job, key) for key in keys)
        ).items():
            pairs = zip(keys, values, strict=True)
            settings.append(Setting({key: value for key, value in pairs if value is not None}, of_setting))
        return settings

    def rank(self, setting: Setting) -> tuple[bool, float]:
        """A sort key of a setting: smaller is better, or of a diagnostic metric a larger effect."""
        if self.is_diagnostic:
            effect = self.effect(setting)
            return effect is None, -abs(effect or 0.0)
        value, _ = setting.result
        size = value or 0.0
        if self.goal is not None and self.goal.direction == "maximize":
            size = -size
        return value is None, size

    @cached_property
    def ranked(self) -> list[JobData]:
        """The rows of the table: baselines, then the jobs of each setting."""
        return [*self.baselines, *chain.from_iterable(setting.jobs for setting in self.settings)]

    @cached_property
    def best(self) -> Setting | None:
        """The best setting, or the one with the largest effect; None if there is none or no common goal."""
        if self.goal is None or not self.settings or self.settings[0].result[0] is None:
            return None
        return self.settings[0]

    @property
    def is_diagnostic(self) -> bool:
        """Whether the goal is a diagnostic metric that no job has as its own objective."""
        if self.goal is None or self.goal.metric.rpartition("/")[2] not in DIAGNOSTIC:
            return False
        return not any(job.objective.get("metric") or job.objective.get("direction") for job in self.jobs)

    def without_hooks(self, setting: Setting) -> float | None:
        """The mean objective of the baselines of the setting's jobs; None if it is not known."""
        values: dict[str, float | None] = {}
        for job in setting.jobs:
            baseline = self.baseline_of(job)
            if baseline is not None:
                values[baseline.name] = baseline.value
        mean, _ = spread(values.values())
        return mean

    def effect(self, setting: Setting) -> float | None:
        """The setting's mean objective minus that without hooks, which is 0 for a divergence from them."""
        without = self.without_hooks(setting)
        if without is None and self.goal is not None:
            without = self.level(self.goal.metric)
        mean, _ = setting.result
        if without is None or mean is None:
            return None
        return mean - without

    def level(self, metric: str) -> float | None:
        """The mean of a metric over the baselines; without them 0 for a divergence from the run without hooks."""
        without, _ = spread(job.metrics.get(metric) for job in self.baselines)
        if without is None and metric.endswith("kl"):
            return 0.0
        return without

    @property
    def better(self) -> Direction | None:
        """The direction of a better result; None if no value is: a diagnostic metric, or a loss that is maximized."""
        if self.goal is None or self.is_diagnostic:
            return None
        if self.goal.direction == "maximize" and is_loss(self.goal.metric):
            return None
        return self.goal.direction

    @cached_property
    def measure(self) -> str:
        """The metric whose difference to the baseline is shown: the objective's, else the first; "" without any."""
        if not self.baselines:
            return ""
        if self.goal is not None:
            return self.goal.metric
        return next(iter(self.metrics), "")

    def baseline_of(self, job: JobData) -> JobData | None:
        """The baseline that differs only in hooks and `vars`, or the only one; None if it is not known."""
        alike = [baseline for baseline in self.baselines if baseline.without_hooks == job.without_hooks]
        if len(alike) > 1:  # other keys take values of `vars` or hooks: the baseline with the same ones
            same = [len(baseline.overrides.items() & job.overrides.items()) for baseline in alike]
            alike = list(compress(alike, [count == max(same) for count in same]))
        if len(alike) == 1:
            return alike[0]
        if len(self.baselines) == 1:
            return self.baselines[0]
        return None

    def difference(self, job: JobData, metric: str) -> float | None:
        """The job's metric minus its baseline's; None for a baseline, and if it is not known."""
        if job in self.baselines:
            return None
        baseline = self.baseline_of(job)
        if baseline is None or metric not in job.metrics or metric not in baseline.metrics:
            return None
        return job.metrics[metric] - baseline.metrics[metric]

    def given(self, job: JobData, key: str) -> str | None:
        """The job's value of a key; None for a key of the hooks that a baseline does not have."""
        if key.startswith("hooks.") and job in self.baselines:
            return None
        return job.overrides.get(key)

    @cached_property
    def total(self) -> int:
        """How many jobs the sweep has, including those that have not started."""
        return max(len(self.jobs), self.started_with)

    @property
    def unfinished(self) -> int:
        """How many jobs are running or not started."""
        return self.counts.get("running", 0) + self.counts.get("not started", 0)

    @cached_property
    def varied(self) -> list[str]:
        """The keys whose values differ between jobs, not counting baselines."""
        given = dict.fromkeys(chain.from_iterable(job.overrides for job in self.compared))
        return [key for key in given if len(self.values_of(key)) > 1]

    def values_of(self, key: str) -> set[str]:
        """The values of a key in the jobs that are not baselines."""
        return {job.given(key) for job in self.compared}

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the table: swept keys, then others that differ, then tags and note."""
        given = set(chain.from_iterable(job.overrides for job in self.jobs))
        keys = [*self.swept, *self.varied, TAGS, NOTE]
        return [key for key in dict.fromkeys(keys) if key in given]

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that any job has: those of validation first."""
        names = set(chain.from_iterable(job.metrics for job in self.jobs))
        return sorted(names, key=lambda name: (name.startswith("train/"), "accuracy" not in name, name))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Status -> how many jobs have it, including those that have not started."""
        counts = Counter(job.status for job in self.jobs)
        counts["not started"] += self.total - len(self.jobs)
        return {status: counts[status] for status in _ORDER if counts[status]}

    @cached_property
    def failed(self) -> list[JobData]:
        """The jobs that did not end well, for whatever reason."""
        return [job for job in self.jobs if job.status in _NOT_WELL]


def conclusion(facts: SweepData) -> str:
    """What the sweep found: its best setting, or the largest effect of a diagnostic metric; "" if that is not known."""
    best = facts.best
    goal = facts.goal
    if best is None or goal is None:
        return ""
    if facts.is_diagnostic:
        return _largest_effect(facts, best, goal)
    name = goal.metric.rpartition("/")[2]
    mean, deviation = best.result
    assert mean is not None, "the best setting has a value"
    keys = " ".join(f"{key}={value}" for key, value in best.values.items())
    text = f"{goal.metric} {amount(name, mean)}"
    if len(best.jobs) == 1:
        job = f"job {best.jobs[0].name}"
        if keys:
            job += f" ({keys})"
        text = f"best: {job}, {text}"
    else:
        if deviation is not None:
            text += f" ± {amount(name, deviation).removesuffix(' %')}"
        seeds = [job.overrides.get("seed") for job in best.jobs if job.value is not None]
        are_seeds = facts.averaged == AVERAGED and len(set(seeds)) == len(seeds)
        text += f" ({counted(len(seeds), 'seed' if are_seeds else 'job')})"
        if len(facts.settings) > 1:
            text = f"best: {keys}, {text}"
    without = facts.without_hooks(best)
    if without is not None:
        text += f" (without hooks: {amount(name, without)})"
    return f"{text}; to {goal}"


def answer_of_sweep(facts: SweepData) -> dict[str, Any] | None:
    """`conclusion` as data; None if it is not known. `ties` counts the other settings that are as good, or as large."""
    best = facts.best
    goal = facts.goal
    if best is None or goal is None:
        return None
    mean, deviation = best.result
    rank = facts.rank(best)
    return {
        "what": "largest_effect" if facts.is_diagnostic else "best_setting",
        "setting": dict(best.values),
        "jobs": [job.name for job in best.jobs],
        "metric": goal.metric,
        "direction": goal.direction,
        "value": mean,
        "deviation": deviation,
        "without_hooks": facts.without_hooks(best),
        "change": facts.effect(best),
        "ties": sum(facts.rank(setting) == rank for setting in facts.settings) - 1,
    }


def _largest_effect(facts: SweepData, best: Setting, goal: Goal) -> str:
    """The setting with the largest effect on a diagnostic metric."""
    name = goal.metric.rpartition("/")[2]
    effect = facts.effect(best)
    if effect is None:
        return f"{name}: baseline=true adds the run without hooks, with which the jobs are compared"
    where = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in best.values.items())
    size = f"{effect:+.3g}"
    without = facts.without_hooks(best)
    if without is not None:
        size += f" over {without:.3g} without hooks"
    return f"largest effect: {where or best.jobs[0].name} ({size}) on {name}"


def amount(name: str, value: float) -> str:
    """A value of the metric `name` as text; an accuracy in percent."""
    if name.endswith("accuracy"):
        return f"{value * 100:.1f} %"
    return f"{value:.4g}"


def read_sweep(folder: Path) -> SweepData:
    """Read the data of every job. Raises StoreError if there is none."""
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}")
    jobs = find_jobs(folder)
    if not jobs:
        raise StoreError(f"{folder} holds no run: no directory in it has a status.json")
    record = SweepRecord()
    if os.path.lexists(folder / SWEEP):
        record = typed_record(folder / SWEEP, SweepRecord)
    return SweepData(folder, jobs, _swept_keys(folder), record.stopped_by, record.jobs or 0)


def _swept_keys(folder: Path) -> list[str]:
    """The keys that the sweep varies, from the file that Hydra wrote when it began; empty if that is not known."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        hydra = read_yaml(folder / MULTIRUN, folder, dict)["hydra"]
        params = [f"{key}={value}" for key, value in (hydra["sweeper"].get("params") or {}).items()]
        texts = [*params, *hydra["overrides"]["task"]]
        if sum(map(len, texts)) > MOST_OVERRIDES:
            return []
        overrides = OverridesParser.create().parse_overrides(texts)
    except (HydraException, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError, ValueError):
        return []  # incomplete, or of a sweeper with another syntax
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


ABOUT_HOOKS = frozenset({"hooks", "hooked", "vars"})
"""The keys that do not matter where no hook is installed; what other keys take from `vars` is in those."""


def is_about_hooks(override: str) -> bool:
    """Whether an override, or one of this key, changes the hooks, or switches them off."""
    return root_of(override) in ("hooks", "hooked")


def _is_baseline(overrides: Mapping[str, str]) -> bool:
    if "hooked" in overrides:
        return overrides["hooked"].lower() == "false"
    without = overrides.get("hooks") == "none" or "~hooks" in overrides
    return without and sum(map(is_about_hooks, overrides)) == 1

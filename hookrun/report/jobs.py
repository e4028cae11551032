"""The jobs of a sweep, each as its own directory tells it, whichever machine ran it and whether it is over or not."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hookrun.report.draw.text import seconds_between
from hookrun.report.lines import sampled
from hookrun.report.yaml_files import read_yaml
from hookrun.store.files import StoreError
from hookrun.store.format import ENV, METRICS, REPORT, STATUS
from hookrun.store.inside import is_there
from hookrun.store.read_records import read_record
from hookrun.store.records import EnvRecord, Record, Status
from hookrun.store.run_dir import cut_off

OVERRIDES = ".hydra/overrides.yaml"
MULTIRUN = "multirun.yaml"
MOST_OVERRIDES = 50_000
"""Characters of a sweep's command line that is taken apart."""

_ENOUGH = 4 * 2**20  # bytes of one job's metrics.jsonl


@dataclass(frozen=True)
class Job:
    """One job.

    name:      its directory, within that of the sweep
    status:    of status.json; ``not started`` where there is none yet, ``cut off`` where its process is no more
    overrides: key -> value, as they were given
    metrics:   ``split/name`` -> the latest value
    """

    name: str
    status: str
    reason: str
    exit_code: int | None
    started: str
    seconds: float | None
    overrides: dict[str, str]
    metrics: dict[str, float]
    argv: list[Any]
    has_report: bool

    @property
    def link(self) -> str:
        """The address of its page, from that of the sweep."""
        return f"./{quote(self.name)}/{REPORT}"


def find_jobs(folder: Path) -> list[Job]:
    """Every job below `folder`, by number."""
    return sorted((_job(folder, path) for path in _job_folders(folder)), key=lambda job: _by_number(job.name))


def _job_folders(folder: Path) -> Iterator[Path]:
    """Directories that hold a run, or where Hydra has begun one; what lies inside of them is not looked at."""
    for where, folders, files in os.walk(folder):
        path = Path(where)
        if path != folder and (STATUS in files or ".hydra" in folders):
            folders.clear()
            yield path
        folders[:] = [name for name in folders if not name.startswith(".")]


def _job(folder: Path, path: Path) -> Job:
    status = _record(path / STATUS, Status)
    reason = _cut_off(status)
    if reason:
        status = {**status, "status": "cut off", "reason": reason}
    values = dict[str, float]()
    for line in sampled(path / METRICS, lambda line: b'"split": "train"' not in line, limit=_ENOUGH).records:
        split = line.get("split", "")
        for name, value in line.items():
            if (
                name not in ("step", "epoch")
                and isinstance(value, int | float)
                and not isinstance(value, bool)
            ):
                values[f"{split}/{name}" if split else name] = value
    return Job(
        name=path.relative_to(folder).as_posix(),
        status=str(status.get("status", "not started")),
        reason=str(status.get("reason") or ""),
        exit_code=status.get("exit_code"),
        started=str(status.get("started", "")),
        seconds=seconds_between(status.get("started"), status.get("ended")) if not reason else None,
        overrides=_overrides(path),
        metrics={name: value for name, value in values.items() if not name.endswith("/lr")},
        argv=list(_record(path / ENV, EnvRecord).get("argv", [])),
        has_report=(path / REPORT).is_file(),
    )


def _cut_off(status: dict[str, Any]) -> str:
    return cut_off(status)


def _record(path: Path, model: type[Record]) -> dict[str, Any]:
    """Empty where there is no such file, or none that can be read; a status says then what is wrong."""
    try:
        return read_record(path, model) if is_there(path) else {}
    except StoreError as error:
        return {"status": "unreadable", "reason": str(error)} if path.name == STATUS else {}


def _overrides(folder: Path) -> dict[str, str]:
    content = read_yaml(folder / OVERRIDES, folder)
    texts = content if isinstance(content, list) else []
    pairs = (str(text).lstrip("+").partition("=") for text in texts)
    return {key: value for key, _, value in pairs}


def swept_keys(jobs: Iterable[Job]) -> list[str]:
    """The keys whose values differ from job to job."""
    jobs = list(jobs)
    every = dict.fromkeys(key for job in jobs for key in job.overrides)
    return [key for key in every if len({job.overrides.get(key) for job in jobs}) > 1]


def asked_for(folder: Path) -> dict[str, int]:
    """Swept key -> how many values, as Hydra wrote it down when the sweep began; empty where that is not known."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    content = read_yaml(folder / MULTIRUN, folder)
    hydra = content.get("hydra", {}) if isinstance(content, dict) else {}
    try:
        params = [f"{key}={value}" for key, value in (hydra["sweeper"].get("params") or {}).items()]
        texts = [*params, *hydra["overrides"]["task"]]
        if sum(map(len, texts)) > MOST_OVERRIDES:
            return {}
        overrides = OverridesParser.create().parse_overrides(texts)
        return {
            override.key_or_group: _values_of(override.value())
            for override in overrides
            if override.is_discrete_sweep()
        }
    except (HydraException, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError, ValueError):
        return {}  # half written, or of a sweeper of its own kind


def _values_of(sweep: Any) -> int:
    """How many values a sweep has, counted without making them."""
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    if isinstance(sweep, RangeSweep) and sweep.start is not None and sweep.stop is not None:
        return max(math.ceil((sweep.stop - sweep.start) / sweep.step), 0)
    raise ValueError("a sweep whose values are not known")


def metric_names(jobs: Iterable[Job]) -> list[str]:
    """The metrics that any job has: those of validation first."""
    names = dict.fromkeys(name for job in jobs for name in job.metrics)
    return sorted(names, key=lambda name: (name.startswith("train/"), "accuracy" not in name, name))


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split("/")]

"""The jobs of a sweep, each read from its own directory, finished or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hookrun.report.draw.text import seconds_between
from hookrun.report.lines import is_kept, sampled
from hookrun.store import stored_config
from hookrun.store.files import StoreError
from hookrun.store.format import ENV, METRICS, REPORT, STATUS
from hookrun.store.inside import is_there
from hookrun.store.records import EnvRecord, MetricsLine, ObjectiveRecord, Record, Status, read_record
from hookrun.store.run_dir import cut_off
from hookrun.store.scores import is_batch, measures, result_of

HYDRA = ".hydra"
OVERRIDES = f"{HYDRA}/overrides.yaml"
CONFIG = f"{HYDRA}/config.yaml"
TAGS = "tags"
MOST_TAGS = 100
_ENOUGH = 4 * 2**20  # bytes of one job's metrics.jsonl


@dataclass(frozen=True)
class JobFacts:
    """One job.

    name:      its directory, within the sweep's
    status:    of status.json; ``not started`` if there is none yet, ``cut off`` if its process does not exist any more
    overrides: key -> value, as they were given
    metrics:   ``split/name`` -> the latest value, of a whole pass if there is one
    of_batch:  the metrics that are of the last logged batch because there is no mean
    result:    the value of the job's objective; None if it has none
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
    argv: list[Any]
    has_report: bool

    @property
    def value(self) -> float | None:
        """Its value of the objective; None if it has no finite value."""
        return None if self.result is None else self.result.value

    @property
    def link(self) -> str:
        """The address of its page, relative to the sweep's page."""
        return f"./{quote(self.name)}/{REPORT}"


def find_jobs(folder: Path) -> list[JobFacts]:
    """Every job below `folder`, by number."""
    folder = folder.resolve()
    return sorted((_job(folder, path) for path in job_folders(folder)), key=lambda job: _by_number(job.name))


def job_folders(folder: Path) -> Iterator[Path]:
    """Directories that hold a run, or where Hydra has begun one; their own folders are not searched."""
    for where, folders, files in os.walk(folder):
        path = Path(where)
        if path != folder and (STATUS in files or HYDRA in folders):
            folders.clear()
            yield path
        folders[:] = [name for name in folders if not name.startswith(".")]


def _job(folder: Path, path: Path) -> JobFacts:
    status = _record(path / STATUS, Status)
    if reason := cut_off(status):
        status = {**status, "status": "cut off", "reason": reason}
    lines = sampled(path / METRICS, MetricsLine, limit=_ENOUGH, always=is_kept).records
    means, batches = dict[str, float](), dict[str, float]()
    for line in lines:
        (batches if is_batch(line) else means).update(measures(line))
    values = {name: value for name, value in (batches | means).items() if not name.endswith("/lr")}
    typed, config = (read_yaml(path / name, path) for name in (OVERRIDES, CONFIG))
    pairs = (str(text).lstrip("+").partition("=") for text in (typed if isinstance(typed, list) else ()))
    overrides = {key: value for key, _, value in pairs}
    if tags := tags_of(config):
        overrides[TAGS] = ", ".join(tags)
    return JobFacts(
        name=path.relative_to(folder).as_posix(),
        status=str(status.get("status", "not started")),
        reason=str(status.get("reason") or ""),
        exit_code=status.get("exit_code"),
        started=str(status.get("started", "")),
        seconds=seconds_between(status.get("started"), status.get("ended")) if not reason else None,
        overrides=overrides,
        metrics=values,
        of_batch=frozenset(values.keys() - means.keys()),
        result=result_of(status, lines) if status.get("status") == "done" else None,
        argv=list(_record(path / ENV, EnvRecord).get("argv", [])),
        has_report=(path / REPORT).is_file(),
    )


def _record(path: Path, model: type[Record]) -> dict[str, Any]:
    """The content of the file; empty if it does not exist or cannot be read, in which case a status says why."""
    try:
        return read_record(path, model) if is_there(path) else {}
    except StoreError as error:
        return {"status": "unreadable", "reason": str(error)} if path.name == STATUS else {}


def tags_of(config: Any) -> list[str]:
    """The tags in a stored configuration, as far as they are texts."""
    tags = config.get(TAGS) if isinstance(config, dict) else None
    return [tag[:100] for tag in tags[:MOST_TAGS] if isinstance(tag, str)] if isinstance(tags, list) else []


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split("/")]


def read_yaml(path: Path, root: Path) -> Any:
    """The content with unresolved interpolations; None if the file is missing or is not YAML.

    root: the directory of the run or the sweep, below which no link is followed
    """
    try:
        return stored_config.read_yaml(path, root)
    except StoreError:
        return None

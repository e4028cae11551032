"""Check that a run directory is unchanged: every file of its manifest, its indexes and its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookrun.store.captures import open_whole_shard
from hookrun.store.files import StoreError, blocks_of_lines, os_reason
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ENV,
    HOOKS,
    INDEX,
    LENS,
    MANIFEST,
    METRICS,
    MODEL,
    PICTURES,
    PLAN,
    PREDICTIONS,
    RECORDED,
    SAMPLES,
    STATS,
    STATUS,
    TOKENS,
    UNFINISHED,
)
from hookrun.store.indexes import index_names, read_index
from hookrun.store.inside import is_there, listed_inside
from hookrun.store.lens_lines import LENS_LINE
from hookrun.store.manifest import hashed, manifest_faults, read_manifest
from hookrun.store.picture_line import PICTURES_LINE
from hookrun.store.read_records import read_record, read_records
from hookrun.store.reader import open_run
from hookrun.store.records import (
    METRICS_LINE,
    SAMPLES_LINE,
    STATS_LINE,
    TOKENS_LINE,
    EnvRecord,
    HooksRecord,
    ModelRecord,
    PlanRecord,
    Record,
    Status,
)
from hookrun.store.run_dir import cut_off
from hookrun.store.shard import Shard
from hookrun.store.stored_config import read_yaml
from hookrun.store.tensor_file import open_tensors

MOST_DISTINCT = 1_000_000
"""The maximum number of lines of metrics that are checked for repetitions."""

_RECORDS: Mapping[str, type[Record]] = {
    PLAN: PlanRecord,
    ENV: EnvRecord,
    MODEL: ModelRecord,
    HOOKS: HooksRecord,
}


@dataclass(frozen=True)
class Verified:
    """The findings of `verify`.

    shards, bytes: the number of indexed shards, and their bytes
    bad:           one line for each file that was changed, is missing or was added
    notes:         harmless findings: files left by a run that was cut off, and what cannot be checked
    status:        of the run; ``""`` if it cannot be read
    """

    shards: int
    bytes: int
    bad: list[str]
    notes: list[str]
    status: str = ""


@dataclass
class _Findings:
    """Faults by file, only the first fault of each, since later ones follow from it. Notes are (file, text)."""

    folder: Path
    faults: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, fault: str) -> None:
        self.faults.setdefault(name, fault)

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """Record a StoreError in the block as the fault of the file."""
        try:
            yield
        except StoreError as error:
            self.add(name, str(error))


def verify(path: Path) -> Verified:
    """Read every file of a run and compare it with the manifest and the indexes. StoreError if there is no run.

    A run that has ended has a manifest, which shows files that were changed, removed or added since. For any other run,
    also one of an earlier version without a manifest, each file is checked by itself and against the indexes.
    """
    folder = open_run(path).path
    findings = _Findings(folder)
    status = dict[str, Any]()
    with findings.judging(STATUS):
        status = read_record(folder / STATUS, Status)
    shards = dict[str, Shard]()
    for name in (CAPTURES, PREDICTIONS):
        with findings.judging(f"{name}/{INDEX}"):
            found, note = read_index(folder / name)
            findings.notes += [(f"{name}/{INDEX}", note)] if note else []
            shards |= {f"{name}/{shard.file}": shard for shard in found}
    if sha256 := status.get("manifest"):
        _judge_by_manifest(findings, sha256, shards)
    else:
        findings.notes += [("", note) for note in (_ending(status),) if note]
        _judge_by_indexes(findings, shards)
    _judge_records(findings)
    _judge_tensors(findings, shards)
    _judge_repetitions(findings)
    if status.get("status") == "done":  # a finished run has no incomplete lines
        for name, note in findings.notes:
            if name:
                findings.add(name, note)
    bad = list(findings.faults.values())
    notes = [note for name, note in findings.notes if name not in findings.faults]
    size = sum(shard.bytes for shard in shards.values())
    return Verified(len(shards), size, bad, notes, str(status.get("status", "")))


_EARLIER = "it is of an earlier hookrun and has no manifest: a file that was removed or added is not noticed"


def _ending(status: Mapping[str, Any]) -> str:
    """Why a run that is not running any more has no manifest."""
    state = status.get("status")
    if state in ("failed", "interrupted"):
        return (
            f"it {'failed' if state == 'failed' else 'was interrupted'}, so it has no manifest: " + _BY_ITSELF
        )
    if state == "running":
        reason = cut_off(status)
        return f"{reason}; it has no manifest: {_BY_ITSELF}" if reason else ""
    return _EARLIER if state else ""


_BY_ITSELF = "each file is judged by itself"


def _judge_by_manifest(findings: _Findings, sha256: str, shards: Mapping[str, Shard]) -> None:
    folder = findings.folder
    recorded = {name: shard.sha256 for name, shard in shards.items()}
    with findings.judging(MANIFEST):
        manifest = read_manifest(folder, sha256)
        for name, fault in sorted(manifest_faults(folder, manifest, recorded)):
            findings.faults[name] = fault  # a changed file outranks faults found inside it
        return
    _judge_by_indexes(findings, shards)


def _judge_by_indexes(findings: _Findings, shards: Mapping[str, Shard]) -> None:
    folder = findings.folder
    for name in (CAPTURES, PREDICTIONS):
        if f"{name}/{INDEX}" in findings.faults:
            continue  # which shards it names is unknown
        with findings.judging(name):
            own = {f"{name}/{index}" for index in index_names(folder / name)}
            findings.notes += [
                (each, f"{folder / each} is in no index")
                for each in _names(folder, name)
                if each not in shards and each not in own
            ]
    for name, shard in shards.items():
        with findings.judging(name):
            _judge_shard(folder / name, folder, shard)


def _judge_shard(path: Path, folder: Path, shard: Shard) -> None:
    if not is_there(path):
        raise StoreError(f"{path} is missing")
    size, sha256 = hashed(path, folder)
    if size != shard.bytes:
        raise StoreError(f"{path} has {size} bytes, its index says {shard.bytes}")
    if sha256 != shard.sha256:
        raise StoreError(
            f"{path} was changed: its SHA-256 is {sha256[:12]}…, its index says {shard.sha256[:12]}…"
        )


def _names(folder: Path, name: str) -> Iterable[str]:
    try:
        return [path for path, _ in listed_inside(folder, name) if not path.startswith(UNFINISHED)]
    except OSError as error:
        raise StoreError(f"cannot list {folder / name}: {os_reason(error)}") from error


def _judge_records(findings: _Findings) -> None:
    folder = findings.folder
    for name, model in _RECORDS.items():
        with findings.judging(name):
            if is_there(folder / name):
                read_record(folder / name, model)
    for name, line in (
        (METRICS, METRICS_LINE),
        (STATS, STATS_LINE),
        (SAMPLES, SAMPLES_LINE),
        (PICTURES, PICTURES_LINE),
        (TOKENS, TOKENS_LINE),
        (LENS, LENS_LINE),
    ):
        with findings.judging(name):
            read_records(folder / name, line)
            findings.notes += [(name, block.note) for block in blocks_of_lines(folder / name) if block.note]
    for name in (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"):
        with findings.judging(name):
            read_yaml(folder / name, folder)


def _judge_tensors(findings: _Findings, shards: Mapping[str, Shard]) -> None:
    """Check the tensors of every file without a fault so far against their index."""
    folder = findings.folder
    for name, shard in shards.items():
        if name not in findings.faults:
            with findings.judging(name):
                open_whole_shard(folder / name.partition("/")[0], shard)
    with findings.judging(CHECKPOINTS):
        for name in _names(folder, CHECKPOINTS):
            if name.endswith(".safetensors") and name not in findings.faults:
                with findings.judging(name):
                    _judge_checkpoint(folder / name, folder)


def _judge_checkpoint(path: Path, folder: Path) -> None:
    try:
        open_tensors(path, folder)
    except StoreError as error:
        raise StoreError(f"{path} is not a readable safetensors file: {error}") from error


def _judge_repetitions(findings: _Findings) -> None:
    """Check that no line of metrics is repeated; a user's own loop may repeat lines."""
    with suppress(StoreError):  # a fault of env.json, which was found before
        if open_run(findings.folder).env.get(RECORDED) is True:
            return
    seen = dict[bytes, int]()
    with findings.judging(METRICS):
        for block in blocks_of_lines(findings.folder / METRICS):
            for number, line in enumerate(block.lines, start=block.first):
                if line in seen:
                    raise StoreError(f"{findings.folder / METRICS}, line {number} repeats line {seen[line]}")
                if len(seen) < MOST_DISTINCT:
                    seen[line] = number

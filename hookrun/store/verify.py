"""Check that a run directory is unchanged: by its manifest, or without one by its indexes of shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookrun.store.captures.shard import Shard, index_names, read_index
from hookrun.store.files import StoreError, os_errors, read_json, read_lines
from hookrun.store.format import (
    CAPTURES,
    ENV,
    HOOKS,
    INDEX,
    MANIFEST,
    MODEL,
    PICTURES,
    PLAN,
    PREDICTIONS,
    STATUS,
    UNFINISHED,
)
from hookrun.store.inside import is_there, listed_inside
from hookrun.store.manifest import manifest_faults, read_manifest, require_unchanged
from hookrun.store.reader import open_run
from hookrun.store.records import STREAMS, Status, read_record
from hookrun.store.run_dir import cut_off


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

    @contextmanager
    def judging(self, name: str) -> Iterator[list[str]]:
        """Record a StoreError in the block as the fault of the file, and the texts of the list as notes on it."""
        notes = list[str]()
        try:
            yield notes
        except StoreError as error:
            self.faults.setdefault(name, str(error))
        self.notes += [(name, note) for note in notes]


def verify(path: Path) -> Verified:
    """Read every file of a run and compare it with the manifest and the indexes. StoreError if there is no run.

    A run that has ended has a manifest, which shows files that were changed, removed or added since. For any other run,
    also one of an earlier version without a manifest, shards are checked against the indexes, and each line of JSON
    must parse.
    """
    folder = open_run(path).path
    findings = _Findings(folder)
    status = dict[str, Any]()
    with findings.judging(STATUS):
        status = read_record(folder / STATUS, Status)
    shards = dict[str, Shard]()
    for name in (CAPTURES, PREDICTIONS):
        with findings.judging(f"{name}/{INDEX}") as notes:
            indexed, cut_lines = read_index(folder / name)
            notes += cut_lines
            shards |= {f"{name}/{shard.file}": shard for shard in indexed}
    manifest = None
    if sha256 := status.get("manifest"):
        with findings.judging(MANIFEST):
            manifest = read_manifest(folder, sha256)
            recorded = {name: shard.sha256 for name, shard in shards.items()}
            # a changed file outranks faults found inside it
            findings.faults |= dict(sorted(manifest_faults(folder, manifest, recorded)))
    elif note := _ending(status):
        findings.notes.append(("", note))
    if manifest is None:
        _judge_by_indexes(findings, shards)
        _judge_json(findings)
    if status.get("status") == "done":  # a finished run has no incomplete lines
        for name, note in findings.notes:
            if name:
                findings.faults.setdefault(name, note)
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


def _judge_by_indexes(findings: _Findings, shards: Mapping[str, Shard]) -> None:
    folder = findings.folder
    for name in (CAPTURES, PREDICTIONS):
        if f"{name}/{INDEX}" in findings.faults:
            continue  # which shards it names is unknown
        with findings.judging(name):
            known = {*shards, *(f"{name}/{index}" for index in index_names(folder / name))}
            with os_errors(f"cannot list {folder / name}"):
                there = [path for path, _ in listed_inside(folder, name)]
            strange = [path for path in there if path not in known and not path.startswith(UNFINISHED)]
            findings.notes += [(path, f"{folder / path} is in no index") for path in strange]
    for name, shard in shards.items():
        with findings.judging(name):
            path = folder / name
            if not is_there(path):
                raise StoreError(f"{path} is missing")
            require_unchanged(path, folder, shard.bytes, shard.sha256, says="its index")


def _judge_json(findings: _Findings) -> None:
    """Check that every JSON file, and every line of the files of lines, parses."""
    folder = findings.folder
    for name in (PLAN, ENV, MODEL, HOOKS):
        with findings.judging(name):
            if is_there(folder / name):
                read_json(folder / name)
    for name in (*STREAMS, PICTURES):
        with findings.judging(name) as notes:
            for _ in read_lines(folder / name, notes=notes):
                pass

"""Check that a run directory is unchanged: by its manifest, or without one by its indexes of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hookrun.store.captures.shard import Shard, index_names, read_index
from hookrun.store.files import StoreError, listed_inside, read_json, read_whole
from hookrun.store.format import (
    CAPTURES,
    CHECKPOINTS,
    ENV,
    EXIT_CODES,
    HOOKS,
    INDEX,
    MANIFEST,
    MODEL,
    PICTURES,
    PLAN,
    PREDICTIONS,
    STATES,
    STATUS,
)
from hookrun.store.manifest import manifest_faults, read_manifest, require_unchanged
from hookrun.store.reader import open_run
from hookrun.store.records import Status, read_record
from hookrun.store.run_dir import cut_off
from hookrun.store.states.files import FILES, read_state, state_names
from hookrun.store.studies import streams


@dataclass(frozen=True)
class Verified:
    """The findings of `verify`.

    files:         the number of files that were checked, beside status.json
    shards, bytes: how many of them are indexed shards, and the bytes of all
    bad:           one line for each file that was changed, is missing or was added
    notes:         harmless findings: files left by a run that was cut off, and what cannot be checked
    status:        of the run; ``""`` if it cannot be read
    """

    files: int
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
        notes: list[str] = []
        try:
            yield notes
        except StoreError as error:
            self.faults.setdefault(name, str(error))
        self.notes += [(name, note) for note in notes]


def verify(path: Path) -> Verified:
    """Read every file of a run and compare it with the manifest and the indexes. StoreError if there is no run.

    A finished run has a manifest, which shows files that were changed, removed or added since. For any other run shards
    are checked against the indexes, and each line of JSON must parse.
    """
    folder = open_run(path).path
    findings = _Findings(folder)
    status = dict[str, Any]()
    with findings.judging(STATUS):
        status = read_record(folder / STATUS, Status)
        contradiction = _contradiction(status)
        if contradiction:
            raise StoreError(f"{folder / STATUS} contradicts itself: {contradiction}")
    shards: dict[str, Shard] = {}
    for name in (CAPTURES, PREDICTIONS):
        with findings.judging(f"{name}/{INDEX}") as notes:
            shards |= {f"{name}/{shard.file}": shard for shard in read_index(folder / name, notes)}
    sizes: dict[str, int] | None = None
    if sha256 := status.get("manifest"):
        with findings.judging(MANIFEST):
            manifest = read_manifest(folder, sha256)
            sizes = {name: size for name, (size, _) in manifest.items()}
            recorded = {name: shard.sha256 for name, shard in shards.items()}
            # a changed file outranks faults found inside it
            findings.faults |= dict(sorted(manifest_faults(folder, manifest, recorded)))
            _judge_states(findings)
    elif note := _ending(status):
        findings.notes.append(("", note))
    if sizes is None:
        sizes = _judge_each_file(findings, shards)
    if status.get("status") == "done":  # a finished run has no incomplete lines
        for name, note in findings.notes:
            if name:
                findings.faults.setdefault(name, note)
    return Verified(
        files=len(sizes),
        shards=len(shards),
        bytes=sum(sizes.values()),
        bad=list(findings.faults.values()),
        notes=[note for name, note in findings.notes if name not in findings.faults],
        status=str(status.get("status", "")),
    )


def _contradiction(status: Mapping[str, Any]) -> str:
    """Which values of a status do not agree; empty if all do."""
    state = status["status"]
    code = status.get("exit_code")
    if state not in EXIT_CODES:
        return f"the status is {state!r}, expected one of {', '.join(EXIT_CODES)}"
    if state == "running":
        if code is not None or status.get("ended") is not None:
            return "the run is running and has ended"
        return ""
    is_whole = state in ("done", "stopped")
    if code != EXIT_CODES[state] if is_whole else code in (None, 0):
        return f"the status is {state!r} and the exit code {code}"
    if is_whole and not status.get("manifest"):
        return f"the status is {state!r}, and it names no manifest"
    try:
        started = datetime.fromisoformat(str(status.get("started")))
        ended = datetime.fromisoformat(str(status.get("ended")))
        if started > ended:
            return f"the run started at {started} and ended at {ended}"
    except (TypeError, ValueError) as error:
        return f"when it started and ended: {error}"
    return ""


def _ending(status: Mapping[str, Any]) -> str:
    """Why a run that is not running any more has no manifest."""
    match status.get("status"):
        case "failed":
            return f"it failed, so it has no manifest: {_BY_ITSELF}"
        case "interrupted":
            return f"it was interrupted, so it has no manifest: {_BY_ITSELF}"
    reason = cut_off(status)
    if reason:
        return f"{reason}; it has no manifest: {_BY_ITSELF}"
    return ""


_BY_ITSELF = "each file is judged by itself"


def _judge_states(findings: _Findings) -> None:
    """Check the resumable states of a finished run, which the manifest leaves out, and that nothing else lies there."""
    folder = findings.folder
    with findings.judging(CHECKPOINTS):
        foreign = {path for path, _ in listed_inside(folder, CHECKPOINTS) if path.startswith(STATES)}
        names = state_names(folder)
        for name in names:
            foreign.difference_update(f"{CHECKPOINTS}/{name}/{file}" for file in FILES)
        for path in sorted(foreign):
            findings.faults[path] = f"{folder / path} belongs to no state: it was added after the run"
        for name in names:
            with findings.judging(f"{CHECKPOINTS}/{name}"):
                read_state(folder, name)


def _judge_each_file(findings: _Findings, shards: Mapping[str, Shard]) -> dict[str, int]:
    """Check the shards by their indexes, and that every JSON file, and every line of the files of lines, parses.

    Returns the size of each file.
    """
    folder = findings.folder
    for name in (CAPTURES, PREDICTIONS):
        if f"{name}/{INDEX}" in findings.faults:
            continue  # which shards it names is unknown
        with findings.judging(name):
            indexes = [f"{name}/{index}" for index in index_names(folder / name)]
            for file, _ in listed_inside(folder, name):
                if file not in shards and file not in indexes:
                    findings.notes.append((file, f"{folder / file} is in no index"))
    for name, shard in shards.items():
        with findings.judging(name):
            path = folder / name
            if not os.path.lexists(path):
                raise StoreError(f"{path} is missing")
            require_unchanged(path, folder, shard.bytes, shard.sha256, says="its index")
    sizes = {name: shard.bytes for name, shard in shards.items()}
    for name in (PLAN, ENV, MODEL, HOOKS, *streams(), PICTURES):
        path = folder / name
        if not os.path.lexists(path):
            continue
        sizes[name] = path.lstat().st_size
        with findings.judging(name) as notes:
            if path.suffix == ".json":
                read_json(path)
            else:
                read_whole(path, folder, notes)
    return sizes

"""The default folder of runs, and the run in it that ended last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookrun.store.files import StoreError
from hookrun.store.format import OUTPUT, STATUS
from hookrun.store.manifest import manifest_faults, read_manifest
from hookrun.store.records import Status, read_record

OUTPUTS = "outputs"


def outputs_folder() -> Path:
    """The folder of single runs, as an absolute path: `outputs` in HOOKRUN_OUTPUT, else in the current directory."""
    return Path(os.path.abspath(Path(os.path.expanduser(os.environ.get(OUTPUT, "")), OUTPUTS)))


def newest_unchanged(folder: Path) -> Path | None:
    """The newest run in `folder` that is done and whose files have not changed since; None if there is none.

    Reads every file of the run.
    """
    for run, status in _ended(folder):
        with suppress(StoreError):  # a run that cannot be read is not reused
            if status["status"] == "done":
                manifest = read_manifest(run, status["manifest"])
                if not any(manifest_faults(run, manifest, {})):
                    return run
    return None


def newest_finished(folder: Path) -> Path:
    """The directory of the run in `folder` that ended last. StoreError if there is none."""
    ended = sorted((status["ended"], run) for run, status in _ended(folder) if status.get("ended"))
    if not ended:
        raise StoreError(f"there is no finished run in {folder}: run one first, or name a run directory")
    return ended[-1][1]


def _ended(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The directories of runs with a manifest and their status, the newest name first, without unreadable ones."""
    for path in sorted(folder.glob(f"*/{STATUS}"), reverse=True):
        if not path.parent.is_symlink():
            with suppress(StoreError):
                status = read_record(path, Status)
                if status.get("manifest"):
                    yield path.parent, status

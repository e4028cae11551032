"""The default folder of runs, and the run in it that ended last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hookrun.store.files import StoreError
from hookrun.store.format import OUTPUT, STATUS
from hookrun.store.inside import is_there
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
    for status in sorted(folder.glob(f"*/{STATUS}"), reverse=True):
        run = status.parent
        if run.is_symlink():
            continue
        try:
            found = read_record(status, Status)
            if found["status"] != "done" or not found.get("manifest"):
                continue
            manifest = read_manifest(run, found["manifest"])
            if not any(manifest_faults(run, manifest, {})):
                return run
        except StoreError:  # a run that cannot be read is not reused
            continue
    return None


def newest_finished(folder: Path) -> Path:
    """The directory of the run in `folder` that ended last. StoreError if there is none."""
    ended = sorted(_ended(folder))
    if not ended:
        raise StoreError(f"there is no finished run in {folder}: run one first, or name a run directory")
    return ended[-1][1]


def _ended(folder: Path) -> Iterator[tuple[str, Path]]:
    for status in folder.glob(f"*/{STATUS}"):
        run = status.parent
        if run.is_symlink() or not is_there(status):
            continue
        try:
            found = read_record(status, Status)
        except StoreError:  # a run that cannot be read
            continue
        if found.get("manifest") and found.get("ended"):
            yield found["ended"], run

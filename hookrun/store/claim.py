"""A run directory has one writer: it is claimed before anything is written into it."""

from __future__ import annotations

import os
from pathlib import Path

from hookrun.errors import listed
from hookrun.store.files import StoreError, make_folder, os_reason
from hookrun.store.format import LOCK

_SHOWN = 4


def claim(folder: Path) -> None:
    """Make the folder, or take an empty one, for this writer alone.

    StoreError if it holds anything, or if another writer was faster.
    """
    make_folder(folder)
    hint = "Choose another directory (run_dir)"
    try:
        os.close(os.open(folder / LOCK, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        raise StoreError(f"{folder} already holds a run, or one that is being written. {hint}") from None
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {os_reason(error)}") from error
    if found := sorted({entry.name for entry in folder.iterdir()} - {LOCK}):
        release(folder)
        raise StoreError(f"{folder} is not empty: it has {listed(found, _SHOWN)}. {hint}")


def release(folder: Path) -> None:
    """The writer is done. A directory that is gone by now needs no lock."""
    (folder / LOCK).unlink(missing_ok=True)

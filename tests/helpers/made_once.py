"""Folders that tests only read, made once for all processes of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hookrun.store.lock import locked


def made_once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, filled by `make` in the first process that needs it; the others wait for it."""
    own = temporary.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    beside = folder.with_name(f"{name} is made")  # nothing runs in a folder that is locked
    with locked(beside, lambda: None):
        done = beside.with_suffix(".done")
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder

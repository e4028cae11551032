"""Reads the files that Hydra wrote into a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookrun.store import stored_config
from hookrun.store.files import StoreError

MULTIRUN = "multirun.yaml"


def read_yaml(path: Path, root: Path) -> Any:
    """The content with unresolved interpolations; None if the file is missing or is not YAML.

    root: the directory of the run or the sweep, below which no link is followed
    """
    try:
        return stored_config.read_yaml(path, root)
    except StoreError:
        return None

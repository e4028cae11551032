"""The files that Hydra wrote into a directory, as far as they can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookrun.errors import SpecError

MULTIRUN = "multirun.yaml"


def read_yaml(path: Path) -> Any:
    """The content, interpolations left as they are; None where the file is missing or does not hold YAML."""
    from omegaconf import OmegaConf

    from hookrun.yaml_files import load

    try:
        return OmegaConf.to_container(load(path), resolve=False) if path.is_file() else None
    except (OSError, SpecError):
        return None

"""What the shipped experiments need."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

EXPERIMENTS = Path(__file__).parents[2] / "conf/experiment"


def needs_of(name: str) -> set[str]:
    """The experiments that an experiment needs, and that these need."""
    content = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())
    own = {need["experiment"] for need in content.get("needs", {}).values()}
    return own.union(*map(needs_of, own))


def copy_needed(source: Path, target: Path, experiments: set[str]) -> None:
    """Copy the finished runs of these experiments from one folder of needed runs to another."""
    for run in (path.parent for path in source.glob("*/*/status.json")):
        words = yaml.safe_load((run / ".hydra/overrides.yaml").read_text())
        if any(f"experiment={name}" in words for name in experiments):
            shutil.copytree(run.parent, target / run.parent.name, dirs_exist_ok=True)

"""The command line that makes a run, or a sweep, again."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookrun.report.jobs import MULTIRUN
from hookrun.report.yaml_files import read_yaml
from hookrun.store.records import HydraRecord, checked

_SHIPPED = "conf"


@dataclass(frozen=True)
class Repeat:
    """How to run it again.

    command: for a shell, in the folder `folder`
    """

    command: str
    folder: str


def repeat_run(path: Path, argv: list[Any]) -> Repeat | None:
    """The command of a run or of a job of a sweep, from what Hydra kept in its directory; None where it kept nothing.

    argv: the command line that the run was started with
    """
    return _repeat(_hydra(path / ".hydra/hydra.yaml", path), argv, job=True)


def repeat_sweep(path: Path, argv: list[Any]) -> Repeat | None:
    """The command of a whole sweep."""
    return _repeat(_hydra(path / MULTIRUN, path), argv, job=False)


def _hydra(path: Path, root: Path) -> HydraRecord | None:
    """What Hydra kept there; None where it kept nothing, or nothing of that form."""
    content = read_yaml(path, root)
    hydra = content.get("hydra", content) if isinstance(content, dict) else None
    try:
        return checked(hydra, HydraRecord) if hydra else None
    except ValueError:
        return None


def _repeat(hydra: HydraRecord | None, argv: list[Any], *, job: bool) -> Repeat | None:
    if hydra is None:
        return None
    words = ["python", "-m", "hookrun"]
    if hydra.mode == "MULTIRUN" or not job:
        words.append("--run" if job else "--multirun")
    sources = {source.provider: source.path for source in hydra.runtime.config_sources}
    if "command-line" in sources:
        words += ["--config-dir", sources["command-line"]]
    if Path(sources.get("main", _SHIPPED)).name != _SHIPPED:
        words += ["--config-path", sources["main"]]
    if hydra.job.config_name not in (None, "config"):
        words += ["--config-name", str(hydra.job.config_name)]
    words += hydra.overrides.task
    kept = ("hydra.searchpath",) if job else ("hydra.searchpath", "hydra/", "hydra.sweeper", "hydra.launcher")
    words += [text for text in hydra.overrides.hydra if text.lstrip("+~").startswith(kept)]
    trusted = [text for text in map(str, argv) if text.lstrip("+").startswith("trust=")]
    words += [text for text in trusted if text not in words]
    command = " ".join(shlex.quote(str(word)) for word in words)
    return Repeat(command, hydra.runtime.cwd)

"""The command line that makes a run, or a sweep, again."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookrun.report.jobs import MULTIRUN
from hookrun.report.yaml_files import read_yaml

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
    return _repeat(_hydra(path / ".hydra/hydra.yaml"), argv, job=True)


def repeat_sweep(path: Path, argv: list[Any]) -> Repeat | None:
    """The command of a whole sweep."""
    return _repeat(_hydra(path / MULTIRUN), argv, job=False)


def _hydra(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    hydra = content.get("hydra", content) if isinstance(content, dict) else {}
    return hydra if isinstance(hydra, dict) else {}


def _repeat(hydra: dict[str, Any], argv: list[Any], *, job: bool) -> Repeat | None:
    if not hydra:
        return None
    overrides, runtime = hydra.get("overrides", {}), hydra.get("runtime", {})
    words = ["python", "-m", "hookrun"]
    if hydra.get("mode") == "MULTIRUN" or not job:
        words.append("--run" if job else "--multirun")
    sources = {source["provider"]: source["path"] for source in runtime.get("config_sources", [])}
    if "command-line" in sources:
        words += ["--config-dir", sources["command-line"]]
    if Path(sources.get("main", _SHIPPED)).name != _SHIPPED:
        words += ["--config-path", sources["main"]]
    name = hydra.get("job", {}).get("config_name")
    if name not in (None, "config"):
        words += ["--config-name", name]
    words += overrides.get("task", [])
    kept = ("hydra.searchpath",) if job else ("hydra.searchpath", "hydra/", "hydra.sweeper", "hydra.launcher")
    words += [text for text in overrides.get("hydra", []) if text.lstrip("+~").startswith(kept)]
    trusted = [text for text in map(str, argv) if text.lstrip("+").startswith("trust=")]
    words += [text for text in trusted if text not in words]
    command = " ".join(shlex.quote(str(word)) for word in words)
    return Repeat(command, str(runtime.get("cwd", "")))

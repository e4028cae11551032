"""The command line that repeats a run or a sweep."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hookrun.report.facts import Facts
from hookrun.report.jobs import read_yaml
from hookrun.report.section import ReportSection
from hookrun.report.sweep_facts import SweepFacts
from hookrun.store.format import MULTIRUN
from hookrun.store.records import HydraRecord, UsedRunRecord, checked

_SHIPPED = "conf"
WEIGHTS = "model.weights"


@dataclass(frozen=True)
class RunAgain:
    """How to run it again.

    command:  for a shell, in the folder `folder`; ``""`` if the directory does not have it
    composed: the whole configuration of a run
    """

    command: str = ""
    folder: str = ""
    composed: str = ""


def _of_a_run(facts: Facts) -> RunAgain | None:
    """The command of a run or a job of a sweep; None if it was a loop of the user's own."""
    if facts.env.recorded:
        return None
    hydra = _hydra(facts.path / ".hydra/hydra.yaml", facts.path)
    runs = [*facts.runs, *_weights(facts)]
    again = _again(hydra, facts.env.argv, is_job=True, runs=runs)
    return replace(again, composed=facts.composed)


def _weights(facts: Facts) -> list[UsedRunRecord]:
    """The file of the model's weights, in the form of an entry of `Facts.runs`."""
    weights = facts.model.weights or ""
    if any(run.where == f"{WEIGHTS}.run" for run in facts.runs):
        return []  # the run that trained them is named
    return [UsedRunRecord(where=WEIGHTS, run="", path=weights)] if os.path.isabs(weights) else []


def _of_a_sweep(facts: SweepFacts) -> RunAgain:
    argv = next((job.argv for job in facts.jobs if job.argv), [])
    return _again(_hydra(facts.folder / MULTIRUN, facts.folder), argv, is_job=False)


def _hydra(path: Path, root: Path) -> HydraRecord | None:
    """The data that Hydra wrote; None if there is none, or it has another form."""
    content = read_yaml(path, root)
    hydra = content.get("hydra", content) if isinstance(content, dict) else None
    try:
        return checked(hydra, HydraRecord) if hydra else None
    except ValueError:
        return None


def _again(
    hydra: HydraRecord | None, argv: list[Any], *, is_job: bool, runs: Sequence[UsedRunRecord] = ()
) -> RunAgain:
    """The command, from what Hydra wrote into the directory.

    argv: the command line of the run; only its `trust=` is not in Hydra's files
    runs: the runs that it took values from; `outputs/latest` may now be a different run
    """
    if hydra is None:
        return RunAgain()
    words = ["python", "-m", "hookrun"]
    if hydra.mode == "MULTIRUN" or not is_job:
        words.append("--run" if is_job else "--multirun")
    sources = {source.provider: source.path for source in hydra.config_sources}
    if "command-line" in sources:
        words += ["--config-dir", sources["command-line"]]
    if Path(sources.get("main", _SHIPPED)).name != _SHIPPED:
        words += ["--config-path", sources["main"]]
    if hydra.config_name not in (None, "config"):
        words += ["--config-name", str(hydra.config_name)]
    words += _with_places(hydra.task_overrides, runs, hydra.cwd)
    of_sweeps = () if is_job else ("hydra/", "hydra.sweeper", "hydra.launcher")
    kept = ("hydra.searchpath", *of_sweeps)
    words += [text for text in hydra.hydra_overrides if text.lstrip("+~").startswith(kept)]
    trusted = [text for text in map(str, argv) if text.lstrip("+").startswith("trust=")]
    words += [text for text in trusted if text not in words]
    command = " ".join(shlex.quote(str(word)) for word in words)
    return RunAgain(command, hydra.cwd)


def _with_places(overrides: list[str], runs: Sequence[UsedRunRecord], cwd: str) -> list[str]:
    """The overrides, with the directory of each run whose name may now mean a different run."""
    places = {
        run.where: run.path
        for run in runs
        if not run.need and os.path.normpath(os.path.join(cwd, run.run)) != run.path
    }
    words = [text for text in overrides if text.lstrip("+").partition("=")[0] not in places]
    for where, path in places.items():
        if _NAMES_A_RUN.fullmatch(where):
            added = "++" if where.endswith(".minus.run") else ""  # the key may come from the value beside it
            words.append(f"{added}{where}={_value(path)}")
    return words


def _value(path: str) -> str:
    """The path as the value of an override."""
    if re.fullmatch(r"[\w./-]+", path):
        return path
    return "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


_NAMES_A_RUN = re.compile(r"(task|model\.weights|hooks(\.[\w-]+)+)\.run|model\.weights")

OF_A_RUN = ReportSection("repeat", "Run it again", _of_a_run, "repeat.html")
OF_A_SWEEP = ReportSection("repeat", "Run it again", _of_a_sweep, "repeat.html")

"""The command line that repeats a run or a sweep."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hookrun.engine.keys import key_of
from hookrun.engine.trust import VARIABLE
from hookrun.report.facts import RunData
from hookrun.report.sweep_facts import SweepData, read_yaml
from hookrun.store.format import MULTIRUN
from hookrun.store.records import EnvRecord, HydraRecord, UsedRunRecord, checked

_SHIPPED = "conf"
WEIGHTS = "model.weights"


def of_a_run(facts: RunData) -> dict[str, str] | None:
    """The command of a run or a job of a sweep, and its configuration; None if it was a loop of the user's own."""
    if facts.env.recorded:
        return None
    runs = [*facts.plan.runs, *facts.env.runs]
    weights = facts.model.weights or ""
    is_of_a_run = any(run.where == f"{WEIGHTS}.run" for run in runs)  # which the command names
    if os.path.isabs(weights) and not is_of_a_run:
        runs.append(UsedRunRecord(where=WEIGHTS, run="", path=weights))
    command = _again(facts.path / ".hydra/hydra.yaml", facts.path, facts.env, is_job=True, runs=runs)
    return {**command, "composed": facts.composed}


def of_a_sweep(facts: SweepData) -> dict[str, str]:
    """The command of a sweep."""
    env = next((job.env for job in facts.jobs if job.env.argv), EnvRecord())
    return {**_again(facts.folder / MULTIRUN, facts.folder, env, is_job=False), "composed": ""}


def _again(
    path: Path, root: Path, env: EnvRecord, *, is_job: bool, runs: Sequence[UsedRunRecord] = ()
) -> dict[str, str]:
    """The command for a shell, and the folder to run it in; both ``""`` if they are not known.

    path: the file that Hydra wrote into the directory of the run or the sweep, `root`
    env:  has the command line of the run, of which `trust=` is not in Hydra's files, and HOOKRUN_TRUST
    runs: the runs that it took values from; `outputs/latest` may now be a different run
    """
    content = read_yaml(path, root, dict)
    try:
        hydra = checked(content.get("hydra", content) or None, HydraRecord)
    except ValueError:  # there is none, or it has another form
        return {"command": "", "folder": ""}
    words: list[str] = []
    if env.trusted:
        words.append(f"{VARIABLE}={','.join(env.trusted)}")
    words += ["python", "-m", "hookrun"]
    if not is_job:
        words.append("--multirun")
    elif hydra.mode == "MULTIRUN":
        words.append("--run")
    sources = {source.provider: source.path for source in hydra.config_sources}
    if "command-line" in sources:
        words += ["--config-dir", sources["command-line"]]
    if "main" in sources and Path(sources["main"]).name != _SHIPPED:
        words += ["--config-path", sources["main"]]
    if hydra.config_name not in (None, "config"):
        words += ["--config-name", hydra.config_name]
    words += _with_places(hydra.task_overrides, runs, hydra.cwd)
    kept: tuple[str, ...] = ("hydra.searchpath",)
    if not is_job:
        kept = ("hydra.searchpath", "hydra/", "hydra.sweeper", "hydra.launcher")
    words += [text for text in hydra.hydra_overrides if key_of(text).startswith(kept)]
    words += [text for text in env.argv if key_of(text) == "trust" and text not in words]
    return {"command": shlex.join(words), "folder": hydra.cwd}


def _with_places(overrides: list[str], runs: Sequence[UsedRunRecord], cwd: str) -> Iterator[str]:
    """The overrides, with the directory of each run whose name may now mean a different run."""
    from hydra.core.override_parser.types import Quote, QuotedString

    places: dict[str, str] = {}
    for run in runs:
        if not run.need and os.path.normpath(os.path.join(cwd, run.run)) != run.path:
            places[run.where] = run.path
    yield from (text for text in overrides if key_of(text) not in places)
    for where, path in places.items():
        if not _NAMES_A_RUN.fullmatch(where):
            continue
        if where.endswith(".minus.run"):
            where = f"++{where}"  # the key may come from the value beside it
        if not re.fullmatch(r"[\w./-]+", path):
            path = QuotedString(path, Quote.single).with_quotes()
        yield f"{where}={path}"


_NAMES_A_RUN = re.compile(r"(task|model\.weights|hooks(\.[\w-]+)+)\.run|model\.weights")

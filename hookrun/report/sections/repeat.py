"""The command line that repeats a run or a sweep."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from hookrun.engine.keys import key_of
from hookrun.engine.trust import VARIABLE
from hookrun.report.facts import Facts
from hookrun.report.sweep_facts import SweepFacts, read_yaml
from hookrun.store.format import MULTIRUN
from hookrun.store.records import EnvRecord, HydraRecord, UsedRunRecord, checked

_SHIPPED = "conf"
WEIGHTS = "model.weights"


def of_a_run(facts: Facts) -> dict[str, str] | None:
    """The command of a run or a job of a sweep, and its configuration; None if it was a loop of the user's own."""
    if facts.env.recorded:
        return None
    runs, weights = [*facts.plan.runs, *facts.env.runs], facts.model.weights or ""
    is_of_a_run = any(run.where == f"{WEIGHTS}.run" for run in runs)  # which the command names
    if os.path.isabs(weights) and not is_of_a_run:
        runs.append(UsedRunRecord(where=WEIGHTS, run="", path=weights))
    return {
        **_again(facts.path / ".hydra/hydra.yaml", facts.path, facts.env, is_job=True, runs=runs),
        "composed": facts.composed,
    }


def of_a_sweep(facts: SweepFacts) -> dict[str, str]:
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
    words = [f"{VARIABLE}={','.join(env.trusted)}"] if env.trusted else []
    words += ["python", "-m", "hookrun"]
    if hydra.mode == "MULTIRUN" or not is_job:
        words.append("--run" if is_job else "--multirun")
    sources = {source.provider: source.path for source in hydra.config_sources}
    main = sources.get("main", _SHIPPED)
    options = {
        "--config-dir": sources.get("command-line"),
        "--config-path": main if Path(main).name != _SHIPPED else None,
        "--config-name": hydra.config_name if hydra.config_name != "config" else None,
    }
    words += chain.from_iterable((key, value) for key, value in options.items() if value is not None)
    words += _with_places(hydra.task_overrides, runs, hydra.cwd)
    of_sweeps = () if is_job else ("hydra/", "hydra.sweeper", "hydra.launcher")
    kept = ("hydra.searchpath", *of_sweeps)
    words += [text for text in hydra.hydra_overrides if key_of(text).startswith(kept)]
    words += [text for text in env.argv if key_of(text) == "trust" and text not in words]
    return {"command": shlex.join(map(str, words)), "folder": hydra.cwd}


def _with_places(overrides: list[str], runs: Sequence[UsedRunRecord], cwd: str) -> Iterator[str]:
    """The overrides, with the directory of each run whose name may now mean a different run."""
    from hydra.core.override_parser.types import Quote, QuotedString

    places = {
        run.where: run.path
        for run in runs
        if not run.need and os.path.normpath(os.path.join(cwd, run.run)) != run.path
    }
    yield from (text for text in overrides if key_of(text) not in places)
    for where, path in places.items():
        if _NAMES_A_RUN.fullmatch(where):
            added = "++" if where.endswith(".minus.run") else ""  # the key may come from the value beside it
            is_plain = re.fullmatch(r"[\w./-]+", path)
            yield f"{added}{where}={path if is_plain else QuotedString(path, Quote.single).with_quotes()}"


_NAMES_A_RUN = re.compile(r"(task|model\.weights|hooks(\.[\w-]+)+)\.run|model\.weights")

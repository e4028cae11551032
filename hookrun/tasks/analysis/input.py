"""The input of an analysis: a run, its captures with one row for each sample, and the rows as vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hookrun.errors import HookrunError, Lookup, SpecError, nearest, printable, spec_error
from hookrun.run_values import BY_TOKEN, RunReferences, is_by_token
from hookrun.spec import Experiment
from hookrun.store.captures.read import StoredCapture
from hookrun.store.format import CAPTURES, INDEX
from hookrun.store.reader import Run
from hookrun.store.records import UsedRunRecord
from hookrun.store.run_dir import RunDir
from hookrun.tasks.analysis.features import SHARE, Features, Projection
from hookrun.tasks.base import Ready
from hookrun.tasks.run.progress import Screen
from hookrun.tasks.run.resuming import Results

_LEAST_NAME = 16
"""The characters of a name that a table keeps on any terminal."""


@dataclass(frozen=True)
class Analysis(Ready):
    """An analysis with the run that it reads.

    captures: module path -> its capture, [samples, ...]
    found:    how the run was found, for the record
    """

    run: Run
    captures: Mapping[str, StoredCapture]
    found: UsedRunRecord

    @property
    def runs(self) -> tuple[UsedRunRecord, ...]:
        """The run that the analysis reads."""
        return (self.found,)


@dataclass(frozen=True)
class Analysing:
    """A running analysis: its input, its own run directory, the screen, and its results so far."""

    analysis: Analysis
    run_dir: RunDir
    screen: Screen
    results: Results = field(default_factory=Results)


def find(experiment: Experiment, path: str | None, hook: str | None, *, by_token: bool) -> Analysis:
    """Open the run and choose its captures.

    path:     the directory or name of the run; None is an error
    hook:     the name of the hook that captured; None: the only one of the run
    by_token: a sample may have a row for each of its tokens

    Raises SpecError if there is no run, no such hook, or no capture with one row for each sample.
    """
    run, used = opened(experiment, "task.run", path)
    try:
        return Analysis(experiment, run, _captures(run, hook, by_token), used)
    except SpecError:
        raise
    except HookrunError as error:
        raise spec_error("task.run", str(error)) from error


def opened(experiment: Experiment, where: str, path: str | None) -> tuple[Run, UsedRunRecord]:
    """The run that the key `where` names by its directory or name, and how it was found.

    Raises SpecError if there is none.
    """
    if path is None:
        raise spec_error(
            where,
            f"task={experiment.settings.task.name} reads the captures of another run, and no run is named",
            f"name its directory: {where}=outputs/latest",
        )
    runs = RunReferences.of(experiment)
    try:
        run, used = runs.open(path), runs.used(where, path)
    except HookrunError as error:
        raise spec_error(where, str(error)) from error
    if run is None or used is None:
        raise spec_error(where, f"{path} has not been run yet", "leave out task=plan, so that it runs first")
    return run, used


def _captures(run: Run, name: str | None, by_token: bool) -> dict[str, StoredCapture]:
    """Module path -> capture, for the captures that hold one tensor with one row for each sample, or each token."""
    there = {hook: run.captures[hook] for hook in run.captures}
    if name is None and len(there) != 1:
        listed = ", ".join(there) or "nothing"
        hint = "name one: task.capture=NAME"
        if not there:  # often the newest run: an analysis, or the training before it
            hint = "give a run that has a hook with action: capture"
            others = sorted(
                (file.parent.parent for file in run.path.parent.glob(f"*/{CAPTURES}/{INDEX}")), reverse=True
            )
            newest = next((each for each in others if not each.is_symlink()), None)
            hint += f"; the newest one beside it: task.run={printable(str(newest))}" if newest else ""
        raise spec_error("task.capture", f"{run.path} captured {listed}", hint)
    if name is not None and name not in there:
        raise spec_error("task.capture", f"found {name!r}", nearest(name, there))
    modules = there[name] if name is not None else next(iter(there.values()))
    found = dict[str, StoredCapture]()
    for module in modules:
        kept = modules[module]
        inside = (
            {f"{module} {path}": kept[path] for path in kept} if isinstance(kept, Lookup) else {module: kept}
        )
        found |= {label: each for label, each in inside.items() if _is_by_sample(each, by_token)}
    if not found:
        text = f"in {run.path} no module of this hook has one row for each sample"
        whole = [each for each in map(modules.__getitem__, modules) if not isinstance(each, Lookup)]
        raise spec_error(
            "task.capture", text, BY_TOKEN if any(map(is_by_token, whole)) else "capture with task=predict"
        )
    return found


def _is_by_sample(capture: StoredCapture, by_token: bool) -> bool:
    ids = capture.sample_ids
    tokens = [capture.positions, capture.keys] if by_token else []
    samples = torch.stack([capture.split_numbers, ids, *tokens], dim=1)
    return bool((ids >= 0).all()) and len(samples.unique(dim=0)) == len(ids)


def features_of(analysis: Analysis, max_bytes: int, project: int | None) -> dict[str, Features]:
    """Module path -> the rows of its capture as vectors.

    max_bytes: the memory that the analysis may use
    project:   the number of features to which wider rows are randomly projected; None: no projection
    """
    features = dict[str, Features]()
    for name, capture in analysis.captures.items():
        plain = Features(name, capture, max_bytes // SHARE)
        if project is not None and plain.captured > project:
            plain = replace(plain, projection=Projection(project, analysis.settings.seed))
        features[name] = plain
    return features


def projection_entry(features: Features) -> dict[str, Any]:
    """The entry about the projection of a module's features in a line of metrics; empty without a projection."""
    return {} if features.projection is None else {"projection": str(features.projection)}


def shown_width(features: Features) -> str:
    """The number of features, ``802,816``, or ``802,816 → 4,096`` if they were projected."""
    captured = f"{features.captured:,}"
    return captured if features.projection is None else f"{captured} → {features.width:,}"


def show_table(
    console: Console, title: str, names: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> None:
    """Print a line for each name. Names that do not fit lose their left ends; numbers are never cut.

    title:   the heading of the names
    columns: heading -> the text beside each name
    """
    widths = [max(map(len, [heading, *texts])) for heading, texts in columns.items()]
    names = [name or "(root)" for name in names]
    room = max(console.width - sum(widths) - 3 * len(widths) - 2, _LEAST_NAME)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(title, no_wrap=True)
    for heading in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, *texts in zip(names, *columns.values(), strict=True):
        shown.add_row(name if len(name) <= room else f"…{name[1 - room :]}", *texts)
    narrow, console.width = console.width, max(console.width, room + sum(widths) + 3 * len(widths) + 2)
    console.print(shown)
    console.width = narrow

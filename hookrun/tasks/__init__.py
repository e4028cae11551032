"""Experiment -> Prepared -> run directory: train, evaluate, predict; plan and modules are shown and leave nothing."""

from __future__ import annotations

from pathlib import Path

from hookrun.errors import HookrunError
from hookrun.spec import Experiment
from hookrun.store.reader import open_run
from hookrun.tasks.analysis import ANALYSES, Analysis, prepare_analysis
from hookrun.tasks.loop.progress import Screen
from hookrun.tasks.loop.run import run, show_prepared
from hookrun.tasks.modules import show_modules
from hookrun.tasks.prepare import Prepared
from hookrun.tasks.prepare import prepare as prepare_model

__all__ = ["Analysis", "Prepared", "objective", "prepare", "run", "show"]


def prepare(experiment: Experiment, *, trust: frozenset[str] = frozenset()) -> Prepared | Analysis:
    """Check everything that can be checked before there is a run directory. Raises SpecError and CompileError."""
    if experiment.settings.task.name in ANALYSES:
        return prepare_analysis(experiment)
    return prepare_model(experiment, trust=trust)


def show(prepared: Prepared | Analysis) -> None:
    """Print what the tasks `plan` and `modules` show."""
    if isinstance(prepared, Analysis):
        raise HookrunError(f"task {prepared.settings.task.name!r} is run, not shown")
    screen = Screen()
    if prepared.settings.task.name == "modules":
        show_modules(prepared, screen)
    else:
        show_prepared(prepared, screen)


def objective(run_dir: Path) -> float:
    """What an optimizing sweeper optimizes: the best validation accuracy, else the last loss.

    Raises HookrunError where the run has neither, as `predict` has.
    """
    metrics = open_run(run_dir).metrics
    accuracies = [line["accuracy"] for line in metrics if line.get("split") == "val" and "accuracy" in line]
    losses = [line["loss"] for line in metrics if "loss" in line]
    if not accuracies and not losses:
        raise HookrunError(f"{run_dir} has neither accuracy nor loss to optimize: use task=train or evaluate")
    return float(max(accuracies) if accuracies else losses[-1])

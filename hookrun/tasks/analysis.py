"""Tasks that look at what a run captured: task=probe and task=similarity. They need neither a model nor hooks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.lookup import Lookup
from hookrun.spec import Experiment, Settings
from hookrun.store.captures import Capture
from hookrun.store.reader import Run, open_run
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.progress import Screen
from hookrun.tasks.probe import Probed, probe
from hookrun.tasks.similarity import linear_cka

ANALYSES = ("probe", "similarity")

WIDEST = 4096
"""Elements of a row; wider ones are projected at random to so many, which keeps their angles and distances."""


@dataclass(frozen=True)
class Analysis:
    """An analysis whose run was found.

    captures: module -> what was captured there, a row for each sample
    """

    experiment: Experiment
    run: Run
    captures: dict[str, Capture]

    @property
    def settings(self) -> Settings:
        """The settings of the experiment."""
        return self.experiment.settings


def prepare_analysis(experiment: Experiment) -> Analysis:
    """Find the run and its captures. Raises SpecError with what is missing, before anything is written."""
    task = experiment.settings.task
    if task.run is None:
        text = f"task={task.name} reads what another run captured, and none is named"
        raise SpecError([Problem("task.run", text, "name its directory: task.run=outputs/latest")])
    try:
        run = open_run(task.run)
        captures = _captures(run, task.capture)
    except SpecError:
        raise
    except HookrunError as error:
        raise SpecError([Problem("task.run", str(error))]) from error
    if task.name == "similarity" and len(captures) < 2:
        text = f"only {', '.join(captures)} was captured: there is nothing to compare it with"
        raise SpecError([Problem("task.capture", text, "capture several modules")])
    if task.name == "probe" and not run.config:
        raise SpecError([Problem("task.run", f"{run.path} does not say which data it used", "run it again")])
    return Analysis(experiment, run, captures)


def _captures(run: Run, name: str | None) -> dict[str, Capture]:
    """Module -> capture, of those that hold one tensor with one row for each sample."""
    there = {hook: run.captures[hook] for hook in run.captures}
    if name is None and len(there) != 1:
        listed = ", ".join(there) or "nothing"
        hint = "name one: task.capture=NAME" if there else "give a run that has a hook with action: capture"
        raise SpecError([Problem("task.capture", f"{run.path} captured {listed}", hint)])
    if name is not None and name not in there:
        raise SpecError([Problem("task.capture", f"found {name!r}", nearest(name, there))])
    modules = there[name] if name is not None else next(iter(there.values()))
    found = dict[str, Capture]()
    for module in modules:
        kept = modules[module]
        inside = (
            {f"{module} {path}": kept[path] for path in kept} if isinstance(kept, Lookup) else {module: kept}
        )
        found |= {label: each for label, each in inside.items() if _is_by_sample(each)}
    if not found:
        text = f"no module of it has one row for each sample in {run.path}"
        raise SpecError([Problem("task.capture", text, "capture with task=predict")])
    return found


def _is_by_sample(capture: Capture) -> bool:
    ids = capture.sample_ids
    return bool((ids >= 0).all()) and len(ids.unique()) == len(ids)


def analyse(analysis: Analysis, run_dir: RunDir) -> None:
    """Run the analysis, and leave its results in metrics.jsonl."""
    screen = Screen()
    screen.say(f"{analysis.settings.task.name} of {analysis.run.path}: {', '.join(analysis.captures)}")
    if analysis.settings.task.name == "probe":
        _probe(analysis, run_dir, screen)
    else:
        _similarity(analysis, run_dir, screen)
    screen.say(f"run directory: {run_dir.path}")


def _matrix(capture: Capture, seed: int) -> Tensor:
    """[samples, elements] float32."""
    rows = capture[:].float().reshape(len(capture), -1)
    if rows.shape[1] <= WIDEST:
        return rows
    generator = torch.Generator().manual_seed(seed)
    projected: Tensor = rows @ (torch.randn(rows.shape[1], WIDEST, generator=generator) / WIDEST**0.5)
    return projected


def _probe(analysis: Analysis, run_dir: RunDir, screen: Screen) -> None:
    seed = analysis.settings.seed
    table = _table("module", "features", "train", "test", "by chance")
    weights = dict[str, Tensor]()
    for module, capture in analysis.captures.items():
        labels = analysis.run.labels_of(capture)
        found: Probed = probe(_matrix(capture, seed), labels, seed)
        run_dir.log_metrics(
            split="probe", module=module, score=found.score, samples=len(capture), features=found.features,
            accuracy=found.test, train_accuracy=found.train, chance=found.chance,
        )  # fmt: skip
        shown = [f"{value:.3f}" for value in (found.train, found.test, found.chance)]
        table.add_row(module, str(found.features), *shown)
        weights |= {f"{module}.{name}": tensor for name, tensor in found.weights.items()}
    screen.console.print(table)
    save_file(weights, run_dir.path / "probes.safetensors")


def _similarity(analysis: Analysis, run_dir: RunDir, screen: Screen) -> None:
    seed, names = analysis.settings.seed, list(analysis.captures)
    matrices = [_matrix(capture, seed) for capture in analysis.captures.values()]
    ids = [capture.sample_ids for capture in analysis.captures.values()]
    if any(not torch.equal(each, ids[0]) for each in ids[1:]):
        raise HookrunError("the modules were captured on different samples: capture them in one run")
    table = _table("linear CKA", *names)
    for row, name in enumerate(names):
        values = [linear_cka(matrices[row], matrices[column]) for column in range(len(names))]
        for other, value in zip(names, values, strict=True):
            run_dir.log_metrics(split="similarity", module=name, other=other, cka=value)
        table.add_row(name, *(f"{value:.3f}" for value in values))
    screen.console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table

"""Prepares an experiment: compiles its hooks into a plan, and checks rows of other runs and weights files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hookrun import models
from hookrun.actions.given import GivenFunction
from hookrun.data import DataInfo, Split
from hookrun.errors import CompileError, Problem, SpecError, listed
from hookrun.plan.plan import PlannedHook
from hookrun.proving import Example, Plan, compile_plan
from hookrun.run_values import FoundRuns, NotYetRun, Source, UsedBy, UsedRun, differences, other_runs
from hookrun.spec import Experiment, Spec
from hookrun.tasks.base import Ready, metrics_of, task_of
from hookrun.tasks.loop.built import EXAMPLE_BATCH, Built, Maker, Score, as_call, model_for
from hookrun.tasks.loop.losses import load_loss
from hookrun.tasks.loop.metrics import load_metrics
from hookrun.tasks.loop.own_code import own_code
from hookrun.tasks.loop.parameter_groups import Trained
from hookrun.tasks.loop.session import device_named, session


@dataclass(frozen=True)
class Prepared(Ready, Built):
    """An experiment with its compiled plan.

    notes:   notes that are shown with the plan
    trained: the parameters that the task trains; None if it does not train
    lines:   lines about the task that are shown with the plan
    """

    plan: Plan
    notes: tuple[str, ...]
    trained: Trained | None = None
    lines: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[UsedRun, ...]:
        """The other runs from which hooks take values."""
        return self.plan.runs


def compiled(
    experiment: Experiment,
    hooks: Spec,
    built: Built,
    split: Split | None,
    *,
    example: Example | None = None,
    training: bool,
    score: Score | None = None,
    notes: Sequence[str] = (),
    maker: Maker = Maker(),  # noqa: B008 - it has no state
) -> Prepared:
    """Compile the hooks for the model, and check them by a trial run with an example.

    split:    the split whose samples the hooks see first; None if they see several splits without training
    example:  the arguments of a model call; None: an example of the data
    training: whether the model is trained; otherwise a backward pass follows the forward only if there is a score
    score:    (output, targets) -> the score from which a backward pass without training starts
    notes:    further notes for the plan

    Raises CompileError, and SpecError if the score cannot be computed from the model's output.
    """
    settings, runs = experiment.settings, FoundRuns(experiment.runs)
    example = example or as_call(built.data.example(EXAMPLE_BATCH), built.model)
    target = built.data.example_target(EXAMPLE_BATCH)
    used_by = UsedBy(settings, split, runs, built.data)
    whole = None if score is None else lambda output: score(output, target)
    plan = maker.plan(hooks, built.model, used_by=used_by, example=example, training=training, score=whole)
    plan = replace(
        plan, code=own_code(settings, built.loss, built.metrics, trains=task_of(experiment).trains)
    )
    plan = replace(plan, runs=(*plan.runs, *other_runs(experiment)))
    notes = (*experiment.notes, *notes, *differences(hooks, settings, runs))
    return Prepared(**vars(built), experiment=experiment, plan=plan, notes=notes)


def compiled_without_data(
    experiment: Experiment, hooks: Spec, split: Split | None, error: SpecError, trust: frozenset[str]
) -> Prepared:
    """Compile the hooks for a model that does not depend on the data, which is missing, as `error` says.

    The result can only be shown: shapes are not checked, and the plan says why.

    Raises `error` if something else is invalid too, or if the model needs the data; CompileError for the hooks.
    """
    settings = experiment.settings
    if not all(each.where.startswith("data.") for each in error.errors):
        raise error
    try:
        with session(settings.compute, settings.seed):
            model = model_for(settings, None, trust)
    except SpecError:
        raise error from None
    leftover = models.load_weights(model, settings.model)
    nothing = DataInfo(settings.data.name, {}, None, None, {"train": 0, "val": 0})
    device = device_named(settings.compute.device)
    origin, applied = models.origin(settings.model), models.applied_hooks(settings.model)
    loss = load_loss(settings.train.loss)
    metrics = load_metrics(metrics_of(settings.task))
    built = Built(nothing, model, device, origin, leftover, applied, loss, metrics, trust)
    plan = compile_plan(hooks, model, used_by=UsedBy(settings, split, FoundRuns(experiment.runs)))
    why = "; ".join(f"{each.where}: {each.what}" for each in error.errors)
    plan = replace(plan, unchecked=why)
    return Prepared(**vars(built), experiment=experiment, plan=plan, notes=tuple(experiment.notes))


def check_rows(plan: Plan, samples: int | None, *, trains: bool) -> None:
    """Check that the other runs have a row for each sample that the hooks will see.

    samples: the hooks see samples with ids below this; None: not known beforehand
    trains:  the hooks see training samples, then validation samples

    Raises CompileError.
    """
    problems = list[Problem]()
    for hook in plan.hooks:
        for field, rows in _different_values(hook):
            if isinstance(rows, Tensor | NotYetRun | GivenFunction) or rows.draws or samples is None:
                continue
            where = f"{hook.spec.where}.{field}"
            if trains and hook.spec.keys.when.mode != "train":
                text = "each training sample uses its own row, and validation samples have no rows"
                problems.append(Problem(where, text, "add when: {mode: train}"))
            elif len(missing := rows.missing(torch.arange(samples))):
                hint = "capture them in that run too, or limit this run: train.limit_batches"
                problems.append(Problem(where, rows.lacks(missing), hint))
    if problems:
        raise CompileError(problems)


def _different_values(hook: PlannedHook) -> Iterator[tuple[str, Source]]:
    """(field, value) of each value that the hook takes from a file or another run, each value once."""
    for field, values in hook.values.items():
        yield from ((field, value) for value in {id(value): value for value in values.values()}.values())


def check_leftover(prepared: Prepared) -> None:
    """Check that hooks add all tensors of the weights file that the model does not have. Raises SpecError."""
    unknown = sorted(set(prepared.leftover) - set(added_names(prepared.plan)))
    if unknown:
        names = listed(unknown, 8)
        text = f"the file holds {len(unknown)} tensors that neither the model nor its hooks have: {names}"
        hint = "use the model and the hooks that the file was saved with"
        raise SpecError([Problem("model.weights", text, hint)])


def added_names(plan: Plan) -> list[str]:
    """The names, in the model, of the parameters that the plan's hooks add."""
    return [
        f"{match.path}.{name}" if match.path else name
        for hook in plan.hooks
        if (name := hook.spec.action.adds(hook.spec.name)) is not None
        for match in hook.matches
    ]

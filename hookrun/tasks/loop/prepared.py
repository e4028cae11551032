"""Everything that can go wrong before a run, gone through before it: device, data, model, weights, plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.errors import CompileError, Problem, SpecError, listed
from hookrun.models.weights import is_path
from hookrun.proving import Plan, compile_plan, misfits
from hookrun.run_values import UsedBy, differences
from hookrun.spec import ROOT_KEYS, Experiment, Settings, Spec
from hookrun.spec.remains import beyond
from hookrun.tasks.base import Ready
from hookrun.tasks.loop.losses import loss_named
from hookrun.tasks.loop.session import device_named, session

EXAMPLE_BATCH = 2  # batch norm needs more than one sample in training mode
_SOME_SHAPE: tuple[int, ...] | None = (3, 64, 64)
_SOME_CLASSES: int | None = 10

T = TypeVar("T")


@dataclass(frozen=True)
class Built:
    """What the settings name.

    leftover: tensors of the weights file that the model does not have: parameters that hooks will add
    applied:  the identities of the hooks that had changed the model when the weights file was written
    """

    data: DataInfo
    model: nn.Module
    device: torch.device
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]


@dataclass(frozen=True)
class Prepared(Ready, Built):
    """An experiment that compiles.

    notes: what to know beside the plan
    """

    plan: Plan
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Attempt:
    """As much of `Built` as could be made, and what was found wrong on the way.

    info, model: None where they are wrong
    problems:    every mistake
    """

    info: DataInfo | None
    model: nn.Module | None
    device: torch.device | None
    leftover: Mapping[str, Tensor]
    problems: list[Problem]

    def built(self, settings: Settings) -> Built:
        """Raises SpecError with every mistake found."""
        if self.problems or self.info is None or self.model is None or self.device is None:
            raise SpecError(self.problems)
        applied = models.applied_hooks(settings.model)
        return Built(self.info, self.model, self.device, self.leftover, applied)


def build(settings: Settings, split: Split, trust: frozenset[str]) -> Built:
    """Describe the data, and build the model with its weights. Reads no data.

    split: whose samples the model has to take
    trust: packages that a user's own model may come from

    Raises SpecError with every mistake found.
    """
    return attempt(settings, split, trust).built(settings)


def attempt(
    settings: Settings,
    split: Split,
    trust: frozenset[str],
    more: Callable[[DataInfo | None], list[Problem]] = lambda info: [],
) -> Attempt:
    """As `build`, and what is wrong is found beside what is right.

    more: further problems of the settings; its argument is None where the data itself is wrong
    """
    problems = list[Problem]()
    device = _collected(problems, lambda: device_named(settings.compute.device))
    info = _collected(problems, lambda: data.describe(settings.data, split))
    _collected(problems, lambda: loss_named(settings.train.loss))
    problems += more(info)
    with session(settings.compute, settings.seed):
        model = _collected(problems, lambda: _model(settings, info, trust))
    leftover = (
        None if model is None else _collected(problems, lambda: models.load_weights(model, settings.model))
    )
    return Attempt(info, model, device, leftover or {}, problems)


def refused(experiment: Experiment, split: Split, tried: Attempt, training: bool) -> SpecError:
    """Every mistake in the configuration, with what does not fit the model of the hooks that are valid.

    Where the data is wrong no sample is known, and the hooks' selectors alone are checked.
    """
    problems, notes = list(tried.problems), list[str]()
    mistaken = _sections(experiment.mistakes)
    has_hooks = bool(experiment.hooks.hooks or experiment.wrong.selections)
    if has_hooks and (tried.model is None or "model" in mistaken):
        notes.append("the hooks were not checked against the model: it is wrong itself")
    elif has_hooks and tried.model is not None:
        info = None if "data" in mistaken else tried.info
        unfit, notes = misfits(
            experiment.hooks,
            experiment.wrong,
            tried.model,
            used_by=UsedBy(experiment.settings, split),
            example=None if info is None else as_call(info.example(EXAMPLE_BATCH)),
            training=training,
            backward=training,
        )
        problems += unfit
        notes += [] if info else ["shapes were not checked: the data is wrong"]
    return SpecError([*experiment.mistakes, *beyond(problems, experiment.mistakes)], notes)


def _sections(mistakes: Sequence[Problem]) -> set[str]:
    """The sections that would say something else about model and data without the mistakes, misspelt ones included."""
    roots = {each.where.partition(".")[0] for each in mistakes if each.where not in _SHAPELESS}
    meant = [get_close_matches(root, ROOT_KEYS, n=1) for root in roots if root not in ROOT_KEYS]
    return roots.union(*meant)


_SHAPELESS = {"data.batch_size", "data.workers"}
"""Keys of the data that say nothing about a sample."""


def without_download(settings: Settings) -> Settings:
    """The settings without published weights, which nobody should wait for who will be refused anyway."""
    if settings.model.weights is None or is_path(settings.model.weights):
        return settings
    return settings.model_copy(update={"model": settings.model.model_copy(update={"weights": None})})


def _collected(problems: list[Problem], make: Callable[[], T]) -> T | None:
    try:
        return make()
    except SpecError as error:
        problems += error.errors
        return None


def _model(settings: Settings, info: DataInfo | None, trust: frozenset[str]) -> nn.Module:
    """The model; where the data is wrong, for a sample that stands in: the names of modules do not depend on it."""
    if info is None:
        shape, classes = _SOME_SHAPE, _SOME_CLASSES
    else:
        shape = info.inputs.shape if isinstance(info.inputs, data.TensorInfo) else None
        classes = info.num_classes
    return models.build(settings.model, sample_shape=shape, num_classes=classes, trust=trust)


def compiled(
    experiment: Experiment,
    hooks: Spec,
    built: Built,
    split: Split,
    *,
    training: bool,
    notes: Sequence[str] = (),
) -> Prepared:
    """Compile the hooks against the model, and prove them with an example of a sample.

    split:    whose samples the hooks meet first
    training: whether the model trains; in evaluation mode no backward pass follows the forward
    notes:    what else to know beside the plan

    Raises CompileError.
    """
    settings = experiment.settings
    plan = compile_plan(
        hooks,
        built.model,
        used_by=UsedBy(settings, split),
        example=as_call(built.data.example(EXAMPLE_BATCH)),
        training=training,
        backward=training,
    )
    notes = (*experiment.notes, *notes, *differences(hooks, settings))
    return Prepared(**vars(built), experiment=experiment, plan=plan, notes=notes)


def check_rows(plan: Plan, samples: int | None, *, trains: bool) -> None:
    """What hooks take from other runs for each sample is there for each sample that they will meet.

    samples: they meet samples with ids below this; None where it is not known beforehand
    trains:  they meet training samples, then those of the validation

    Raises CompileError.
    """
    problems = list[Problem]()
    for hook in plan.hooks:
        for field, rows in hook.values.items():
            if isinstance(rows, Tensor) or rows.draws or samples is None:
                continue
            where = f"{hook.spec.where}.{field}"
            if trains and hook.spec.keys.when.mode != "train":
                text = "each training sample takes its own row, and those of the validation have none"
                problems.append(Problem(where, text, "add when: {mode: train}"))
            elif len(missing := rows.missing(torch.arange(samples))):
                hint = "capture them there as well, or limit this run: train.limit_batches"
                problems.append(Problem(where, rows.lacks(missing), hint))
    if problems:
        raise CompileError(problems)


def check_leftover(prepared: Prepared) -> None:
    """What a weights file has beyond the model is what the hooks add. Raises SpecError."""
    unknown = sorted(set(prepared.leftover) - set(added_names(prepared.plan)))
    if unknown:
        names = listed(unknown, 8)
        text = f"the file holds {len(unknown)} tensors that neither the model nor its hooks have: {names}"
        hint = "use the model and the hooks that the file was saved with"
        raise SpecError([Problem("model.weights", text, hint)])


def added_names(plan: Plan) -> list[str]:
    """The names in the model of the parameters that the plan's hooks add."""
    return [
        f"{match.path}.{name}" if match.path else name
        for hook in plan.hooks
        if (name := hook.spec.action.adds(hook.spec.name)) is not None
        for match in hook.matches
    ]


def as_call(batch: Tensor | Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model call for a batch: named inputs are keyword arguments."""
    return ((batch,), {}) if isinstance(batch, Tensor) else ((), dict(batch))

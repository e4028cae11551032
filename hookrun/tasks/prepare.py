"""Everything that can go wrong before a run, gone through before it: settings, data, model, plan, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.errors import CompileError, Problem, SpecError
from hookrun.plan.graph_support import uncompilable, unexportable
from hookrun.proving import Plan, compile_plan
from hookrun.run_values import UsedBy, differences
from hookrun.spec import Experiment, Settings, Spec, parse_spec
from hookrun.tasks.loop.losses import NEED_TARGET, loss_named
from hookrun.tasks.loop.optimizers import check_arguments, check_optimizer, check_scheduler
from hookrun.tasks.loop.session import device_named, session

EXAMPLE_BATCH = 2  # batch norm needs more than one sample in training mode

T = TypeVar("T")


READING = ("evaluate", "predict", "export")
"""Tasks that read `task.split`."""


@dataclass(frozen=True)
class Prepared:
    """An experiment that compiles: what a task starts from.

    leftover: tensors of the weights file that belong to parameters which hooks will add
    notes:    what to know beside the plan
    """

    experiment: Experiment
    data: DataInfo
    model: nn.Module
    plan: Plan
    device: torch.device
    leftover: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> Settings:
        """The settings of the experiment."""
        return self.experiment.settings


def prepare(experiment: Experiment, *, trust: frozenset[str] = frozenset()) -> Prepared:
    """Build the model and compile the hooks against it; nothing is read from the data and nothing written.

    trust: packages that a user's own model may come from

    Raises SpecError and CompileError with every mistake found.
    """
    settings = experiment.settings
    problems = list[Problem]()
    device = _collected(problems, lambda: device_named(settings.compute.device))
    info = _collected(problems, lambda: data.describe(settings.data, _split(settings)))
    problems += [*_training_problems(settings, info), *_board_problems(settings)]
    with session(settings.compute, settings.seed):
        model = _collected(problems, lambda: _model(settings, info, trust))
        if info is None:  # what a network takes from the data is missing for that reason alone
            problems = [each for each in problems if not each.where.startswith("model.args.")]
        if problems or model is None or info is None or device is None:
            raise SpecError(problems)
        leftover = models.load_weights(model, settings.model)
        if _trains(settings) and (refused := check_arguments(settings.train, model)):
            raise SpecError(refused)
    listing = settings.task.name == "modules"
    hooks = _every_module() if listing else experiment.hooks
    example = as_call(info.example(EXAMPLE_BATCH))
    training = _trains(settings) or listing
    used_by = UsedBy(settings, _split(settings))
    plan = compile_plan(hooks, model, used_by=used_by, example=example, training=training)
    if not listing:
        _check_leftover(leftover, plan)
        _check_rows(plan, settings, info)
        _check_graph(settings, plan)
    plan = replace(plan, samples=_samples(settings, info))
    return Prepared(experiment, info, model, plan, device, leftover, differences(hooks, settings))


def _trains(settings: Settings) -> bool:
    """`plan` shows what `train` would do."""
    return settings.task.name in ("train", "plan")


def _split(settings: Settings) -> Split:
    """The split whose samples the hooks meet first."""
    return settings.task.split if settings.task.name in READING else "train"


def _collected(problems: list[Problem], make: Callable[[], T]) -> T | None:
    try:
        return make()
    except SpecError as error:
        problems += error.errors
        return None


def _model(settings: Settings, info: DataInfo | None, trust: frozenset[str]) -> nn.Module:
    inputs = info.inputs if info else None
    shape = inputs.shape if isinstance(inputs, data.TensorInfo) else None
    return models.build(
        settings.model, sample_shape=shape, num_classes=info.num_classes if info else None, trust=trust
    )


def _training_problems(settings: Settings, info: DataInfo | None) -> list[Problem]:
    train = settings.train
    problems = list[Problem]()
    _collected(problems, lambda: loss_named(train.loss))
    if _trains(settings):
        problems += check_optimizer(train.optimizer)
        if train.scheduler is not None:
            problems += check_scheduler(train.scheduler)
    scores = settings.task.name in ("train", "evaluate")
    if info and info.target is None and train.loss in NEED_TARGET and scores:
        text = f"{train.loss!r} needs targets, and the data {info.name!r} has none"
        hint = "use output, output_mean or output_sum, or name a target"
        problems.append(Problem("train.loss", text, hint))
    return problems


def _board_problems(settings: Settings) -> list[Problem]:
    if not settings.task.tensorboard or find_spec("tensorboard") is not None:
        return []
    return [Problem("task.tensorboard", "tensorboard is not installed", "pip install 'hookrun[tensorboard]'")]


def _every_module() -> Spec:
    """A hook that stands for a look at every module."""
    return parse_spec({"every": {"select": "**", "hook": "forward", "action": "capture"}})


def _check_rows(plan: Plan, settings: Settings, info: DataInfo) -> None:
    """What hooks take from other runs for each sample is there for each sample that they will see."""
    samples, training = _length(settings, info), settings.task.name == "train"
    problems = list[Problem]()
    for hook in plan.hooks:
        for field, rows in hook.values.items():
            if isinstance(rows, Tensor) or rows.draws or samples is None:
                continue
            where = f"{hook.spec.where}.{field}"
            if training and hook.spec.keys.when.mode != "train":
                text = "each training sample takes its own row, and those of the validation have none"
                problems.append(Problem(where, text, "add when: {mode: train}"))
            elif len(missing := rows.missing(torch.arange(samples))):
                hint = "capture them there as well, or limit this run: train.limit_batches"
                problems.append(Problem(where, rows.lacks(missing), hint))
    if problems:
        raise CompileError(problems)


def _check_graph(settings: Settings, plan: Plan) -> None:
    """The hooks go into a graph, where one is asked for."""
    problems = uncompilable(plan) if settings.compute.compile else []
    if settings.task.name == "export":
        problems = unexportable(plan)
    if problems:
        raise CompileError(problems)


def _check_leftover(leftover: Mapping[str, Tensor], plan: Plan) -> None:
    unknown = sorted(set(leftover) - set(added_names(plan)))
    if unknown:
        shown = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        text = f"the file holds {len(unknown)} tensors that neither the model nor its hooks have: {shown}"
        raise SpecError(
            [Problem("model.weights", text, "use the model and the hooks that the file was saved with")]
        )


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


def _length(settings: Settings, info: DataInfo) -> int | None:
    """How many samples of the split are used, as far as it is known beforehand."""
    size, limit = info.sizes[_split(settings)], settings.train.limit_batches
    if settings.task.name == "train" and settings.train.shuffle:
        return size
    bound = limit * settings.data.batch_size if limit else None
    return size if bound is None or size is None else min(size, bound)


def _samples(settings: Settings, info: DataInfo) -> int | None:
    """How many samples a run passes through the hooks, as far as it is known beforehand."""
    limit = settings.train.limit_batches
    bound = limit * settings.data.batch_size if limit else None
    sizes = {
        split: size if bound is None or size is None else min(size, bound)
        for split, size in info.sizes.items()
    }
    if settings.task.name in READING:
        return sizes[settings.task.split]
    train, val = sizes["train"], sizes["val"]
    return (
        None
        if train is None or val is None or settings.train.steps
        else (train + val) * settings.train.epochs
    )

"""torch's optimizers and learning-rate schedules by name, from closed registries read from torch; and clipping."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hookrun.engine.runtime.optimizers import without_compiler
from hookrun.engine.runtime.sharded import whole
from hookrun.engine.spec.selector.base import shown
from hookrun.engine.trust.load import OPTIMIZERS as OWN_OPTIMIZERS
from hookrun.engine.trust.load import SCHEDULERS as OWN_SCHEDULERS
from hookrun.engine.trust.load import load_class
from hookrun.engine.validation import missing_arguments, parameters, unknown_arguments, wrong_call
from hookrun.errors import Mistakes, Problem, SpecError, misnamed, spec_error
from hookrun.run.experiment.parameter_groups import ParameterGroup
from hookrun.run.experiment.settings import MOST, Named, Schedule, Scheduler, Train
from hookrun.run.experiment.settings import Optimizer as OptimizerKeys
from hookrun.store.states.tree import NotPlain, flatten

OPTIMIZER, SCHEDULER = "train.optimizer", "train.scheduler"
FILLED = ("T_max", "total_steps")
"""The arguments of schedules that default to the length of the run."""

_NEED_CODE = {LambdaLR, MultiplicativeLR, LRScheduler}
_COMPOSED: tuple[type[LRScheduler], ...] = (SequentialLR, ChainedScheduler)
_GIVEN = frozenset({"optimizer", "schedulers"})
"""The arguments of these classes that hookrun passes itself."""


def _classes_in(module: ModuleType, base: type, without: Collection[type]) -> dict[str, type]:
    """Name -> class, for the subclasses of `base` in a module of torch that are not private."""
    classes: dict[str, type] = {}
    for name, item in vars(module).items():
        is_class = isinstance(item, type) and issubclass(item, base)
        if is_class and item not in without and not name.startswith("_"):
            classes[name] = item
    return classes


OPTIMIZERS: Mapping[str, type[Optimizer]] = _classes_in(
    torch.optim, Optimizer, (Optimizer, torch.optim.LBFGS)
)
"""Every optimizer of torch.optim that steps without a closure."""

SCHEDULERS: Mapping[str, type[LRScheduler]] = _classes_in(lr_scheduler, LRScheduler, _NEED_CODE)
"""Every schedule of torch.optim.lr_scheduler whose arguments are plain values or other schedules."""


# ---- what is found before the run ------------------------------------------------------------------------------------


def check_optimizer(named: OptimizerKeys) -> list[Problem]:
    """The mistakes in the name of an optimizer and in the argument names of the optimizer and its groups."""
    problems, cls = _check_named(named, OPTIMIZER, OPTIMIZERS)
    if cls is not None:
        arguments = list(parameters(cls) or {})[1:]
        for number, group in enumerate(named.groups):
            where = f"{OPTIMIZER}.groups.{number}"
            problems += unknown_arguments(group.args, arguments, where, cls.__name__)
    return problems


def check_scheduler(named: Schedule, where: str = SCHEDULER) -> list[Problem]:
    """The mistakes in the name of a schedule, in its argument names, its interval and its parts."""
    problems, cls = _check_named(named, where, SCHEDULERS, FILLED)
    by_step = isinstance(named, Scheduler) and named.interval == "step"
    if not problems and by_step and cls is ReduceLROnPlateau:
        problems.append(
            Problem(
                f"{where}.interval",
                "ReduceLROnPlateau watches the validation loss, which is computed once per epoch",
                "use interval: epoch",
            )
        )
    if cls is not None:
        problems += _check_parts(named, cls, where)
    for number, part in enumerate(named.schedulers or ()):
        problems += check_scheduler(part, f"{where}.schedulers.{number}")
    return problems


def _check_named(
    named: Named, where: str, registry: Mapping[str, type], filled: Iterable[str] = ()
) -> tuple[list[Problem], type | None]:
    """The mistakes in a name and in the names of its arguments; and the class, None if there is none of the name.

    filled: arguments that hookrun adds
    """
    try:
        cls = _class_of(named.name, where, registry)
    except SpecError as error:
        return error.errors, None
    takes = parameters(cls) or {}
    if ":" in named.name:
        given = set(named.args).union(key for key in filled if key in takes)
        return wrong_call(cls, given, where, named.name, first=1), cls
    # hookrun passes the first argument (the parameters or the optimizer) and the parts of a schedule itself
    configurable = {key: takes[key] for key in list(takes)[1:] if key not in _GIVEN}
    problems = unknown_arguments(named.args, configurable, where, cls.__name__)
    problems += missing_arguments({*named.args, *filled}, configurable, where, cls.__name__)
    return problems, cls


def _class_of(name: str, where: str, registry: Mapping[str, type]) -> type:
    """The class of torch with this name, or a user's own `package.module:Class`.

    Raises SpecError if torch has no such class, or the user's is not trusted, cannot be loaded or needs a closure.
    """
    if ":" in name and registry is SCHEDULERS:
        return load_class(name, LRScheduler, OWN_SCHEDULERS, f"{where}.name")
    if ":" in name:
        optimizer = load_class(name, Optimizer, OWN_OPTIMIZERS, f"{where}.name")
        takes = parameters(optimizer.step) or {}  # type: ignore[attr-defined]
        besides_self = {key: takes[key] for key in list(takes)[1:]}
        if missing_arguments((), besides_self, where, ""):
            raise spec_error(
                f"{where}.name",
                f"'{optimizer.__qualname__}' needs a closure in step, which the loop does not pass",
                "give its step(closure=None) a default",
            )
        return optimizer
    cls = _of_torch(name, registry)
    if cls is None:
        what = f"found {name!r}, which torch does not have"
        raise SpecError([misnamed(f"{where}.name", what, name, registry)])
    return cls


def _of_torch(name: str, registry: Mapping[str, type]) -> type | None:
    """The class of torch with this name, in which capitals and underscores make no difference; None: there is none."""
    plain = name.lower().replace("_", "")
    for key, item in registry.items():
        if key.lower() == plain:
            return item
    return None


def _check_parts(named: Schedule, cls: type, where: str) -> Iterator[Problem]:
    """The mistakes in which schedules a schedule of this class consists of, and in its milestones."""
    key = f"{where}.schedulers"
    parts = named.schedulers or ()
    if cls not in _COMPOSED:
        if named.schedulers is not None:
            yield Problem(
                key,
                f"'{cls.__name__}' takes no argument 'schedulers'",
                "SequentialLR and ChainedScheduler take it",
            )
        return
    if not parts:
        yield Problem(
            key,
            f"is missing: '{cls.__name__}' needs a list of schedules",
            "list them, each with its name and arguments: schedulers: [{name: LinearLR, total_iters: 100}, ...]",
        )
        return
    for number, part in enumerate(parts):
        inner = _of_torch(part.name, SCHEDULERS)
        if inner is ReduceLROnPlateau:
            yield Problem(
                f"{key}.{number}.name",
                f"ReduceLROnPlateau watches the validation loss, which a {cls.__name__} does not pass on",
                "use it alone, or another schedule here",
            )
        elif inner is not None and inner in _COMPOSED and cls is SequentialLR:
            yield Problem(
                f"{key}.{number}.name",
                f"torch's SequentialLR cannot hold a {inner.__name__}",
                "list plain schedules here, with a milestone between neighbours",
            )
    if cls is SequentialLR and "milestones" in named.args:
        yield from _check_milestones(named.args["milestones"], f"{where}.milestones", len(parts))


def _check_milestones(milestones: Any, where: str, parts: int) -> Iterator[Problem]:
    """The mistake in the milestones between so many schedules."""
    if not isinstance(milestones, list | tuple) or not all(map(_is_milestone, milestones)):
        yield Problem(
            where,
            f"found {shown(milestones)}, expected a list of whole numbers from 1",
            "a milestone is the step or epoch (see `interval`) at which the next schedule begins: [100]",
        )
    elif any(second <= first for first, second in pairwise(milestones)):
        yield Problem(
            where, f"found {shown(milestones)}, expected each milestone to be greater than the last"
        )
    elif len(milestones) != parts - 1:
        yield Problem(
            where,
            f"found {len(milestones)} for {parts} schedules, expected one between each two: {parts - 1}",
        )


def _is_milestone(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def check_arguments(train: Train, model: nn.Module, groups: Sequence[ParameterGroup]) -> list[Problem]:
    """The values that the optimizer or its schedule refuses, found by constructing both and discarding them.

    groups: the parameter groups; a small tensor replaces each parameter that hooks will add
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        for name in group.names:
            by_name.setdefault(name, nn.Parameter(torch.zeros(1, 1)))
    named = train.optimizer
    mistakes = Mistakes()
    for group in groups:
        if group.where:  # torch checks only the default values, not those of groups
            alone = replace(group, args={})
            updated = named.model_copy(update=dict(group.args))
            mistakes.tried(make_optimizer, updated, [alone], by_name, group.where)
    if mistakes.problems:
        return mistakes.problems
    optimizer = mistakes.tried(make_optimizer, named, groups, by_name)
    if optimizer is None:
        return mistakes.problems
    if train.scheduler is not None:
        intervals = last_milestone(train.scheduler) + 2
        scheduler = mistakes.tried(make_scheduler, train.scheduler, optimizer, intervals)
        mistakes.add(_unsavable(scheduler, SCHEDULER))
    if ":" in named.name:
        mistakes.tried(mistakes.add, _own_problems(named))
    return mistakes.problems


def _own_problems(named: Named) -> Iterator[Problem]:
    """A problem if the state that a user's own optimizer has after a step cannot be saved."""
    with torch.random.fork_rng(devices=[]):  # draws by the user's code must not change the run
        trial = {name: nn.Parameter(torch.ones(2, 2)) for name in ("first", "second")}
        optimizer = make_optimizer(named, [ParameterGroup("", "", tuple(trial))], trial)
        for parameter in trial.values():
            parameter.grad = torch.ones_like(parameter)
        # it may not accept these gradients; then the first saved state shows problems
        with suppress(Exception):
            optimizer.step()
    yield from _unsavable(optimizer, OPTIMIZER)


def _unsavable(made: Optimizer | LRScheduler | None, where: str) -> Iterator[Problem]:
    """A problem if the present state of a user's own optimizer or schedule cannot be saved; torch's can."""
    if made is None or type(made).__module__.startswith("torch."):
        return
    try:
        flatten(made.state_dict())
    except NotPlain as error:
        yield Problem(
            f"{where}.name",
            f"the state of {type(made).__qualname__} cannot be saved, so the run could not be resumed: {error}",
            "let state_dict() return numbers, strings, lists, tuples, dicts and tensors, and load_state_dict() take "
            "them",
        )


def schedule_notes(named: Schedule, where: str) -> Iterator[str]:
    """Notes on what a user may not expect of a composed schedule."""
    for number, part in enumerate(named.schedulers or ()):
        place = f"{where}.schedulers.{number}"
        yield from schedule_notes(part, place)
        if _of_torch(part.name, SCHEDULERS) is OneCycleLR:
            yield (
                f"{place}: torch's OneCycleLR sets the learning rate that all schedules of the composition start from "
                "to max_lr / div_factor"
            )


# ---- creation --------------------------------------------------------------------------------------------------------


def make_optimizer(
    named: Named,
    groups: Sequence[ParameterGroup],
    by_name: Mapping[str, nn.Parameter],
    where: str = OPTIMIZER,
) -> Optimizer:
    """The optimizer of the groups, whose parameters are found by name. SpecError for arguments that it refuses."""
    cls = without_compiler(_class_of(named.name, OPTIMIZER, OPTIMIZERS))
    trained = [{"params": [by_name[name] for name in group.names], **group.args} for group in groups]
    return _constructed(cls, where, named.args, trained)


def make_scheduler(
    named: Schedule, optimizer: Optimizer, intervals: int, where: str = SCHEDULER
) -> LRScheduler:
    """The schedule. Its length defaults to that of the run, or of its part of a SequentialLR.

    intervals: how many times the run steps the schedule
    """
    cls = _class_of(named.name, where, SCHEDULERS)
    if named.schedulers is None:
        takes = parameters(cls) or {}
        given_in_epochs = "epochs" in named.args  # OneCycleLR takes `epochs` and `steps_per_epoch` instead
        length = {key: intervals for key in FILLED if key in takes and not given_in_epochs}
        return _constructed(cls, where, length | named.args, optimizer)
    spans = [intervals] * len(named.schedulers)
    if "milestones" in named.args:
        bounds = [0, *named.args["milestones"], intervals]
        spans = [max(end - start, 1) for start, end in pairwise(bounds)]
    parts = [
        make_scheduler(part, optimizer, spans[number], f"{where}.schedulers.{number}")
        for number, part in enumerate(named.schedulers)
    ]
    return _constructed(cls, where, {"schedulers": parts, "optimizer": optimizer, **named.args})


def _constructed(cls: type, where: str, args: Mapping[str, Any], *first: Any) -> Any:
    """An object of the class. Raises SpecError for arguments that it refuses."""
    takes = parameters(cls) or {}
    problems: list[Problem] = []
    for key, value in args.items():
        # torch compares a text with numbers, and names no argument
        if isinstance(value, str) and key in takes and type(takes[key].default) in (int, float):
            problems.append(Problem(f"{where}.{key}", f"found {value!r}, expected a number"))
    if problems:
        raise SpecError(problems)
    try:
        return cls(*first, **args)
    except Exception as error:  # torch's classes raise many types for wrong arguments
        raise spec_error(where, f"{cls.__name__} refuses its arguments: {error}") from error


def last_milestone(named: Schedule) -> int:
    """The last milestone in a schedule and its parts; 0 if there is none."""
    if named.schedulers is None:
        return 0
    inner = [last_milestone(part) for part in named.schedulers]
    return max([*named.args.get("milestones", []), *inner], default=0)


# ---- clipping over all trained parameters together -------------------------------------------------------------------


def clip(train: Train, optimizer: Optimizer) -> Tensor | None:
    """Clip the optimizer's gradients, which are already unscaled and accumulated.

    `grad` and `post_accumulate_grad` hooks run before the clipping, `optimizer_step_pre` hooks after it.

    Returns the total norm of the gradients before clipping, a tensor without dimensions; None if nothing is clipped.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if train.clip_grad_norm is not None:
        norm: Tensor = clip_grad_norm_(trained, train.clip_grad_norm)
    elif train.clip_grad_value is not None:
        norm = get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        clip_grad_value_(trained, train.clip_grad_value)
    else:
        return None
    return whole(norm)

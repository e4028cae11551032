"""torch's optimizers and learning-rate schedules by name, from closed registries read from torch; and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hookrun.config.validation import missing_arguments, parameters, unknown_arguments, wrong_call
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.runtime.plain_optimizers import without_compiler
from hookrun.runtime.sharded import whole
from hookrun.spec.experiment import MOST, Named, Schedule, Scheduler, Train
from hookrun.spec.experiment import Optimizer as OptimizerKeys
from hookrun.spec.selector.base import shown
from hookrun.store.states.tree import NotPlain, flatten
from hookrun.tasks.training.parameter_groups import ParameterGroup
from hookrun.trust import load as trusted
from hookrun.trust.load import load_class

OPTIMIZER, SCHEDULER = "train.optimizer", "train.scheduler"
FILLED = ("T_max", "total_steps")
"""The arguments of schedules that default to the length of the run."""

_NEED_CODE = frozenset({"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "LRScheduler"})
_NEED_CLOSURE = frozenset({"LBFGS"})

_COMPOSED: tuple[type[LRScheduler], ...] = (SequentialLR, ChainedScheduler)
_GIVEN = frozenset({"optimizer", "schedulers"})
"""The arguments of these classes that hookrun passes itself."""


@cache
def optimizers() -> Mapping[str, type[Optimizer]]:
    """Every optimizer of torch.optim that steps without a closure."""
    found = {name: item for name, item in vars(torch.optim).items() if isinstance(item, type)}
    return {
        name: item
        for name, item in found.items()
        if issubclass(item, Optimizer) and item is not Optimizer and name not in _NEED_CLOSURE
    }


@cache
def schedulers() -> Mapping[str, type[LRScheduler]]:
    """Every schedule of torch.optim.lr_scheduler whose arguments are plain values."""
    found = {name: item for name, item in vars(lr_scheduler).items() if isinstance(item, type)}
    return {
        name: item
        for name, item in found.items()
        if issubclass(item, LRScheduler) and not name.startswith("_") and name not in _NEED_CODE
    }


def _schedules() -> Mapping[str, type[LRScheduler]]:
    """Every schedule, including those that consist of other schedules."""
    return {**schedulers(), **{each.__name__: each for each in _COMPOSED}}


def check_optimizer(named: Named) -> list[Problem]:
    """The mistakes in the name of an optimizer and in the argument names of the optimizer and its groups."""
    problems, cls = _check_named(named, OPTIMIZER, optimizers())
    own = [] if cls is None else list(parameters(cls) or {})[1:]
    for number, group in enumerate(
        named.groups if cls is not None and isinstance(named, OptimizerKeys) else ()
    ):
        where = f"{OPTIMIZER}.groups.{number}"
        problems += unknown_arguments(group.args, own, where, named.name if cls is None else cls.__name__)
    return problems


def check_scheduler(named: Schedule, where: str = SCHEDULER) -> list[Problem]:
    """The mistakes in the name of a schedule, in its argument names, its interval and its parts."""
    problems, cls = _check_named(named, where, _schedules(), FILLED)
    by_step = isinstance(named, Scheduler) and named.interval == "step"
    if not problems and by_step and cls is ReduceLROnPlateau:
        text = "ReduceLROnPlateau watches the validation loss, which is computed once per epoch"
        problems.append(Problem(f"{where}.interval", text, "use interval: epoch"))
    parts = named.schedulers or ()
    if cls is not None:
        classes = [_check_named(part, where, _schedules())[1] for part in parts]
        problems += wrong_parts(named, cls, classes, where)
    for number, part in enumerate(parts):
        problems += check_scheduler(part, _part(where, number))
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
        given = {*named.args, *(key for key in filled if key in takes)}
        return wrong_call(cls, given, where, named.name, first=1), cls
    # hookrun passes the first argument (the parameters or the optimizer) and the parts of a schedule itself
    own = {key: parameter for key, parameter in list(takes.items())[1:] if key not in _GIVEN}
    problems = unknown_arguments(named.args, own, where, cls.__name__)
    return problems + missing_arguments({*named.args, *filled}, own, where, cls.__name__), cls


def _class_of(name: str, where: str, registry: Mapping[str, type]) -> type:
    """The class of torch with this name, or a user's own `package.module:Class`.

    Raises SpecError if torch has no such class, or the user's is not trusted or cannot be loaded.
    """
    if ":" in name and registry is optimizers():
        return _stepping(load_class(name, Optimizer, trusted.OPTIMIZERS, f"{where}.name"))
    if ":" in name:
        return load_class(name, LRScheduler, trusted.SCHEDULERS, f"{where}.name")
    by_lower = {key.lower(): item for key, item in registry.items()}
    cls = by_lower.get(name.lower().replace("_", ""))
    if cls is None:
        what = f"found {name!r}, which torch does not have"
        raise SpecError([Problem(f"{where}.name", what, nearest(name, registry))])
    return cls


def _stepping(cls: type) -> type:
    """The optimizer class itself. Raises SpecError if its `step` needs a closure."""
    if missing_arguments((), dict([*(parameters(cls.step) or {}).items()][1:]), OPTIMIZER, ""):  # type: ignore[attr-defined]
        text = f"'{cls.__qualname__}' needs a closure in step, which the loop does not pass"
        raise SpecError([Problem(f"{OPTIMIZER}.name", text, "give its step(closure=None) a default")])
    return cls


def check_arguments(train: Train, model: nn.Module, groups: Sequence[ParameterGroup] = ()) -> list[Problem]:
    """The values that the optimizer or its schedule refuses, found by constructing both and discarding them.

    groups: the parameter groups; a small tensor replaces each parameter that hooks will add
    """
    if not groups and not any(parameter.requires_grad for parameter in model.parameters()):
        return []  # hooks may add trainable parameters
    there = dict(model.named_parameters(remove_duplicate=False))
    named = there | {
        name: nn.Parameter(torch.zeros(1, 1)) for group in groups for name in group.names if name not in there
    }
    problems = list[Problem]()
    for group in groups:
        if group.where:  # torch checks only the default values, not those of groups
            args = train.optimizer.args | dict(group.args)
            try:
                _made(train.optimizer, group.where, optimizers(), [named[name] for name in group.names], args)
            except SpecError as error:
                problems += error.errors
    if problems:
        return problems

    def tried(parameters: list[nn.Parameter]) -> Optimizer:
        return _made(train.optimizer, OPTIMIZER, optimizers(), parameters, train.optimizer.args)  # type: ignore[no-any-return]

    try:
        optimizer = make_optimizer(train.optimizer, model, groups, named)
        schedule = make_scheduler(train.scheduler, optimizer, intervals=last_milestone(train.scheduler) + 2)
        return [*unsavable_schedule(schedule, SCHEDULER), *unsavable_optimizer(tried, OPTIMIZER)]
    except SpecError as error:
        return error.errors


def make_optimizer(
    named: Named,
    model: nn.Module,
    groups: Sequence[ParameterGroup] = (),
    by_name: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """The optimizer of the groups; without groups, of all parameters that require a gradient.

    by_name: the parameters that groups name; None: those of the model

    Raises SpecError for arguments that it refuses, HookrunError if there is nothing to train.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False)) if by_name is None else by_name
    trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if groups:
        trained = [{"params": [by_name[name] for name in each.names], **each.args} for each in groups]
    if not trained:
        raise HookrunError(
            "nothing to train: no parameter of the model requires a gradient; task=evaluate does not need one"
        )
    return _made(named, OPTIMIZER, optimizers(), trained, named.args)  # type: ignore[no-any-return]


def make_scheduler(
    named: Schedule | None, optimizer: Optimizer, intervals: int, where: str = SCHEDULER
) -> LRScheduler | None:
    """The schedule. Its length defaults to that of the run, or of its part of a SequentialLR.

    intervals: how many times the run steps the schedule
    """
    if named is None:
        return None
    cls = _class_of(named.name, where, _schedules())
    if named.schedulers is not None:
        parts = [
            make_scheduler(part, optimizer, length, _part(where, number))
            for number, (part, length) in enumerate(
                zip(named.schedulers, lengths(named, intervals), strict=True)
            )
        ]
        return _tried(cls, where, lambda: cls(schedulers=parts, optimizer=optimizer, **named.args))  # type: ignore[no-any-return]
    takes = parameters(cls) or {}
    given_in_epochs = "epochs" in named.args  # OneCycleLR takes `epochs` and `steps_per_epoch` instead
    length = {key: intervals for key in FILLED if key in takes and not given_in_epochs}
    return _made(named, where, _schedules(), optimizer, length | named.args)  # type: ignore[no-any-return]


def _made(named: Named, where: str, registry: Mapping[str, type], first: Any, args: Mapping[str, Any]) -> Any:
    cls = _class_of(named.name, where, registry)
    made = without_compiler(cls) if registry is optimizers() else cls
    if texts := [
        Problem(f"{where}.{key}", f"found {value!r}, expected a number")
        for key, value in args.items()
        if isinstance(value, str) and _is_number(cls, key)
    ]:
        raise SpecError(texts)
    return _tried(cls, where, lambda: made(first, **args))


def _is_number(cls: type, key: str) -> bool:
    """Whether the argument is a number by default; torch compares a text with numbers and names no argument."""
    found = (parameters(cls) or {}).get(key)
    return found is not None and type(found.default) in (int, float)


def _tried(cls: type, where: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # torch's classes raise many types for wrong arguments
        raise SpecError([Problem(where, f"{cls.__name__} refuses its arguments: {error}")]) from error


# ---- schedules that consist of other schedules: one after the other, or all at once ----------------------------------


def _part(where: str, number: int) -> str:
    """The key path of one of the schedules of a composed one."""
    return f"{where}.schedulers.{number}"


def wrong_parts(named: Schedule, cls: type, inner: Sequence[type | None], where: str) -> Iterator[Problem]:
    """The mistakes in the parts of a schedule.

    cls:   the class of the schedule
    inner: the classes of its parts; None for an unknown name
    where: the key path of the schedule
    """
    key = f"{where}.schedulers"
    if cls not in _COMPOSED:
        if named.schedulers is not None:
            hint = "SequentialLR and ChainedScheduler take it"
            yield Problem(key, f"'{cls.__name__}' takes no argument 'schedulers'", hint)
        return
    if not named.schedulers:
        hint = "list them, each with its name and arguments: schedulers: [{name: LinearLR, total_iters: 100}, ...]"
        yield Problem(key, f"is missing: '{cls.__name__}' needs a list of schedules", hint)
        return
    for number, part in enumerate(inner):
        if part is ReduceLROnPlateau:
            text = f"ReduceLROnPlateau watches the validation loss, which a {cls.__name__} does not pass on"
            yield Problem(f"{_part(where, number)}.name", text, "use it alone, or another schedule here")
        elif part in _COMPOSED and cls is SequentialLR:
            text = f"torch's SequentialLR cannot hold a {part.__name__}"
            hint = "list plain schedules here, with a milestone between neighbours"
            yield Problem(f"{_part(where, number)}.name", text, hint)
    if cls is SequentialLR and "milestones" in named.args:
        yield from _wrong_milestones(named.args["milestones"], len(inner), f"{where}.milestones")


def _wrong_milestones(found: Any, parts: int, where: str) -> Iterator[Problem]:
    numbers = found if isinstance(found, list | tuple) else [found]
    if not isinstance(found, list | tuple) or not all(
        isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= MOST for each in numbers
    ):
        hint = "a milestone is the step or epoch (see `interval`) at which the next schedule begins: [100]"
        yield Problem(where, f"found {shown(found)}, expected a list of whole numbers from 1", hint)
    elif any(second <= first for first, second in pairwise(numbers)):
        yield Problem(where, f"found {shown(found)}, expected each milestone to be greater than the last")
    elif len(numbers) != parts - 1:
        text = f"found {len(numbers)} for {parts} schedules, expected one between each two: {parts - 1}"
        yield Problem(where, text)


def lengths(named: Schedule, intervals: int) -> list[int]:
    """How many times each part is stepped in a run of `intervals` steps or epochs; at least 1 for each."""
    parts = len(named.schedulers or ())
    if "milestones" not in named.args:
        return [intervals] * parts
    bounds = [0, *named.args["milestones"], intervals]
    return [max(end - start, 1) for start, end in pairwise(bounds)]


def last_milestone(named: Schedule | None) -> int:
    """The last milestone in a schedule and its parts; 0 if there is none."""
    if named is None or named.schedulers is None:
        return 0
    return max([*named.args.get("milestones", []), *map(last_milestone, named.schedulers)], default=0)


def schedule_notes(named: Schedule, where: str) -> Iterator[str]:
    """Notes on what a user may not expect of a composed schedule."""
    for number, part in enumerate(named.schedulers or ()):
        yield from schedule_notes(part, _part(where, number))
        if part.name.lower().replace("_", "") == OneCycleLR.__name__.lower():
            yield (
                f"{_part(where, number)}: torch's OneCycleLR sets the learning rate that all schedules of the "
                "composition start from to max_lr / div_factor"
            )


# ---- states of a user's own optimizer or schedule, which have to be savable; torch's are -----------------------------


_SAVABLE = "let state_dict() return numbers, strings, lists, tuples, dicts and tensors, and load_state_dict() take them"


def unsavable_optimizer(make: Callable[[list[nn.Parameter]], Optimizer], where: str) -> list[Problem]:
    """A problem if the state of an optimizer, after a step, cannot be saved.

    make:  parameters -> the optimizer
    where: its key path
    """
    with torch.random.fork_rng(devices=[]):  # draws by the user's code must not change the run
        parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))]
        made = make(parameters)
        if _is_torchs(made):
            return []
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with suppress(
            Exception
        ):  # it may not accept these gradients; then the first saved state shows problems
            made.step()
    return _unsavable(made, where)


def unsavable_schedule(schedule: LRScheduler | None, where: str) -> list[Problem]:
    """A problem if the state of a schedule, before its first step, cannot be saved."""
    return [] if schedule is None or _is_torchs(schedule) else _unsavable(schedule, where)


def _unsavable(found: Optimizer | LRScheduler, where: str) -> list[Problem]:
    try:
        flatten(found.state_dict())
    except NotPlain as error:
        what = f"the state of {type(found).__qualname__} cannot be saved, so the run could not be resumed: {error}"
        return [Problem(f"{where}.name", what, _SAVABLE)]
    return []


def _is_torchs(found: object) -> bool:
    return type(found).__module__.startswith("torch.")


# ---- clipping over all trained parameters together -------------------------------------------------------------------


def clip(train: Train, optimizer: Optimizer) -> Tensor | None:
    """Clip the optimizer's gradients, which are already unscaled and accumulated.

    `grad` and `post_accumulate_grad` hooks run before the clipping, `optimizer_step_pre` hooks after it.

    Returns the total norm of the gradients before clipping, a tensor without dimensions; None if nothing is clipped.
    """
    if train.clip_grad_norm is not None:
        norm: Tensor = clip_grad_norm_(_trained_by(optimizer), train.clip_grad_norm)
        return whole(norm)
    if train.clip_grad_value is not None:
        parameters = _trained_by(optimizer)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        clip_grad_value_(parameters, train.clip_grad_value)
        return whole(norm)
    return None


def _trained_by(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

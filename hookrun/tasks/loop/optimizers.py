"""torch's optimizers and learning-rate schedules by name: closed registries read from torch itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hookrun import trusted
from hookrun.arguments import missing_arguments, parameters, unknown_arguments, wrong_call
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.spec.experiment import Named, Scheduler, Train
from hookrun.trusted import load_class

OPTIMIZER, SCHEDULER = "train.optimizer", "train.scheduler"
FILLED = ("T_max", "total_steps")
"""The arguments of schedules that default to the length of the run."""

_NEED_CODE = frozenset({"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "LRScheduler"})
_NEED_CLOSURE = frozenset({"LBFGS"})


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


def check_optimizer(named: Named) -> list[Problem]:
    """The mistakes in the name of an optimizer and in the names of its arguments."""
    return _check_named(named, OPTIMIZER, optimizers())


def check_scheduler(named: Scheduler) -> list[Problem]:
    """The mistakes in the name of a schedule, in the names of its arguments and in its interval."""
    problems = _check_named(named, SCHEDULER, schedulers(), FILLED)
    if not problems and named.interval == "step" and _found(named.name, schedulers()) is ReduceLROnPlateau:
        text = "ReduceLROnPlateau watches the validation loss, which there is once per epoch"
        problems.append(Problem(f"{SCHEDULER}.interval", text, "use interval: epoch"))
    return problems


def _check_named(
    named: Named, where: str, registry: Mapping[str, type], filled: Iterable[str] = ()
) -> list[Problem]:
    try:
        cls = _found(named.name, registry)
    except SpecError as error:
        return error.errors
    if cls is None:
        return [
            Problem(
                f"{where}.name",
                f"found {named.name!r}, which torch does not have",
                nearest(named.name, registry),
            )
        ]
    if ":" in named.name:
        return wrong_call(
            cls, {*named.args, *(set(filled) & {*(parameters(cls) or {})})}, where, named.name, first=1
        )
    found = list((parameters(cls) or {}).items())
    own = dict(found[1:])  # hookrun gives the first: the model's parameters, or the optimizer
    problems = unknown_arguments(named.args, own, where, cls.__name__)
    return problems + missing_arguments({*named.args, *filled}, own, where, cls.__name__)


def _found(name: str, registry: Mapping[str, type]) -> type | None:
    """A class of torch by name, or one of the user's own, `package.module:Class`. SpecError for one not trusted."""
    if ":" in name:
        if registry is optimizers():
            return _stepping(load_class(name, Optimizer, trusted.OPTIMIZERS, f"{OPTIMIZER}.name"))
        return load_class(name, LRScheduler, trusted.SCHEDULERS, f"{SCHEDULER}.name")
    by_lower = {key.lower(): item for key, item in registry.items()}
    return by_lower.get(name.lower().replace("_", ""))


def _stepping(cls: type) -> type:
    """An optimizer that steps without a closure. SpecError for one that needs it."""
    if missing_arguments((), dict([*(parameters(cls.step) or {}).items()][1:]), OPTIMIZER, ""):  # type: ignore[attr-defined]
        text = f"'{cls.__qualname__}' steps with a closure, which the loop does not have"
        raise SpecError([Problem(f"{OPTIMIZER}.name", text, "give its step(closure=None) a default")])
    return cls


def check_arguments(train: Train, model: nn.Module) -> list[Problem]:
    """The values that the optimizer or its schedule refuses, found by constructing both and discarding them."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return []  # hooks may add trainable parameters
    try:
        make_scheduler(train.scheduler, make_optimizer(train.optimizer, model), intervals=2)
    except SpecError as error:
        return error.errors
    return []


def make_optimizer(named: Named, model: nn.Module) -> Optimizer:
    """The optimizer of the parameters that require a gradient.

    Raises SpecError for arguments that it refuses, HookrunError where there is nothing to train.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise HookrunError(
            "nothing to train: no parameter of the model requires a gradient; task=evaluate needs none"
        )
    return _made(named, OPTIMIZER, optimizers(), trained, named.args)  # type: ignore[no-any-return]


def make_scheduler(named: Scheduler | None, optimizer: Optimizer, intervals: int) -> LRScheduler | None:
    """The schedule; where its length is not given, it is that of the run.

    intervals: how many times the run will step it
    """
    if named is None:
        return None
    cls = _found(named.name, schedulers())
    takes = parameters(cls) or {} if cls else {}
    given_in_epochs = "epochs" in named.args  # OneCycleLR takes `epochs` and `steps_per_epoch` instead
    length = {key: intervals for key in FILLED if key in takes and not given_in_epochs}
    return _made(named, SCHEDULER, schedulers(), optimizer, length | named.args)  # type: ignore[no-any-return]


def _made(named: Named, where: str, registry: Mapping[str, type], first: Any, args: Mapping[str, Any]) -> Any:
    cls = _found(named.name, registry)
    if cls is None:
        raise SpecError([Problem(f"{where}.name", f"found {named.name!r}", nearest(named.name, registry))])
    try:
        return cls(first, **args)
    except Exception as error:  # torch's classes may raise anything for arguments that they cannot use
        raise SpecError([Problem(where, f"{cls.__name__} refuses its arguments: {error}")]) from error

"""Whether the state of an optimizer and of its schedule can be saved: tried on two parameters, before the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookrun.errors import Problem
from hookrun.store.tree import NotPlain, flatten

_HINT = "let state_dict() return numbers, texts, lists, tuples, mappings and tensors, and load_state_dict() take them"


def unsavable(
    make: Callable[[nn.Module], tuple[Optimizer, LRScheduler | None]], optimizer: str, scheduler: str
) -> list[Problem]:
    """What a resumable state could not hold.

    make:      the optimizer of a model and its schedule
    optimizer: the key path of the one
    scheduler: and of the other

    Classes of torch are not tried: what they keep is known.
    """
    made, schedule = make(nn.Linear(2, 2))
    problems = list[Problem]()
    if not _is_torchs(made):
        for parameter in made.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        with suppress(
            Exception
        ):  # of the user's own code, for gradients like these: the first states will tell
            made.step()
        problems += _problems(made, optimizer)
    if schedule is not None and not _is_torchs(schedule):
        problems += _problems(schedule, scheduler)
    return problems


def _problems(found: Optimizer | LRScheduler, where: str) -> list[Problem]:
    try:
        flatten(found.state_dict())
    except NotPlain as error:
        what = f"the state of {type(found).__qualname__} cannot be saved, so the run could not be resumed: {error}"
        return [Problem(f"{where}.name", what, _HINT)]
    return []


def _is_torchs(found: object) -> bool:
    return type(found).__module__.startswith("torch.")

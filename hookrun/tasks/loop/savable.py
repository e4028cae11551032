"""Checks before the run whether the state of a user's own optimizer or schedule can be saved.

Classes of torch are not checked: their states can be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookrun.errors import Problem
from hookrun.store.tree import NotPlain, flatten

_HINT = "let state_dict() return numbers, strings, lists, tuples, dicts and tensors, and load_state_dict() take them"


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
    return _problems(made, where)


def unsavable_schedule(schedule: LRScheduler | None, where: str) -> list[Problem]:
    """A problem if the state of a schedule, before its first step, cannot be saved."""
    return [] if schedule is None or _is_torchs(schedule) else _problems(schedule, where)


def _problems(found: Optimizer | LRScheduler, where: str) -> list[Problem]:
    try:
        flatten(found.state_dict())
    except NotPlain as error:
        what = f"the state of {type(found).__qualname__} cannot be saved, so the run could not be resumed: {error}"
        return [Problem(f"{where}.name", what, _HINT)]
    return []


def _is_torchs(found: object) -> bool:
    return type(found).__module__.startswith("torch.")

"""Whether the state of an optimizer or a schedule of the user's own can be saved: tried before the run.

Classes of torch are not tried: what they keep is known.
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

_HINT = "let state_dict() return numbers, texts, lists, tuples, mappings and tensors, and load_state_dict() take them"


def unsavable_optimizer(make: Callable[[list[nn.Parameter]], Optimizer], where: str) -> list[Problem]:
    """What a resumable state could not hold of an optimizer, after a step.

    make:  the optimizer of some parameters
    where: its key path
    """
    with torch.random.fork_rng(devices=[]):  # the user's own code may draw, and the run begins as without it
        parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))]
        made = make(parameters)
        if _is_torchs(made):
            return []
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with suppress(Exception):  # gradients like these may mean nothing to it: the first state will tell
            made.step()
    return _problems(made, where)


def unsavable_schedule(schedule: LRScheduler | None, where: str) -> list[Problem]:
    """What a resumable state could not hold of a schedule, which is given before its first step."""
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

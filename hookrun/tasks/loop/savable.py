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
    with torch.random.fork_rng(devices=[]):  # the user's own code may draw, and the run begins as without it
        made, schedule = make(nn.ParameterList([torch.ones(2, 2), torch.ones(2, 2)]))
        for parameter in made.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        if not _is_torchs(made):
            with suppress(
                Exception
            ):  # gradients like these may mean nothing to it: the first state will tell
                made.step()
    problems = [] if _is_torchs(made) else _problems(made, optimizer)
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

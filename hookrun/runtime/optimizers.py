"""The steps of every optimizer in the process, for the installations that follow them.

torch's global step hooks live in a dictionary that it iterates over during each step: a thread that registered one
while another thread steps would break that step. So one pair of hooks is registered for the process, once, and does
nothing without a follower; the followers are an immutable tuple that is exchanged as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Follower(Protocol):
    """What an installation does at each step of an optimizer."""

    def before(self, optimizer: Optimizer) -> None:
        """The optimizer is about to use the gradients."""

    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""


_followers: tuple[Follower, ...] = ()
_changing = threading.Lock()


def follow(follower: Follower) -> None:
    """Tell the follower of every step from now on."""
    global _followers
    with _changing:
        _followers = (*_followers, follower)


def unfollow(follower: Follower) -> None:
    """Tell it of no further step."""
    global _followers
    with _changing:
        _followers = tuple(each for each in _followers if each is not follower)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """torch's global pre-hook; `args` begins with the optimizer. It may return other arguments."""
    followers = _followers
    if not followers:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _tell_before(followers, optimizer)
        return None
    wrapped = _then(closure, lambda: _tell_before(followers, optimizer))
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _then(closure: Callable[[], Any], after: Callable[[], None]) -> Callable[[], Any]:
    def run() -> Any:
        loss = closure()
        after()
        return loss

    return run


def _tell_before(followers: tuple[Follower, ...], optimizer: Optimizer) -> None:
    for follower in followers:
        follower.before(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch's global post-hook."""
    for follower in _followers:
        follower.after(optimizer)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)

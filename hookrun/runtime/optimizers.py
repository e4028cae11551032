"""Calls installations before and after each step of any optimizer in the process.

torch iterates over a dictionary of global step hooks during each step, so registering a hook in one thread while
another thread steps would break that step. Therefore one pair of hooks is registered once per process; it does nothing
without followers. The followers are an immutable tuple that is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Follower(Protocol):
    """Called at each step of any optimizer."""

    def before(self, optimizer: Optimizer) -> None:
        """The optimizer is about to use the gradients."""

    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""


_followers: tuple[Follower, ...] = ()
_changing = threading.Lock()


def follow(follower: Follower) -> None:
    """Call the follower at every step from now on."""
    global _followers
    with _changing:
        _followers = (*_followers, follower)


def unfollow(follower: Follower) -> None:
    """Stop calling the follower."""
    global _followers
    with _changing:
        _followers = tuple(each for each in _followers if each is not follower)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """torch's global pre-hook; `args` begins with the optimizer. Returns changed arguments, or None for no change."""
    followers = _followers
    if not followers:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _call_before(followers, optimizer)
        return None
    wrapped = _then(closure, lambda: _call_before(followers, optimizer))
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _then(closure: Callable[[], Any], after: Callable[[], None]) -> Callable[[], Any]:
    def run() -> Any:
        loss = closure()
        after()
        return loss

    return run


def _call_before(followers: tuple[Follower, ...], optimizer: Optimizer) -> None:
    for follower in followers:
        follower.before(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch's global post-hook."""
    for follower in _followers:
        follower.after(optimizer)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)

"""Calls functions before and after each step of any optimizer in the process.

torch iterates over a dictionary of global step hooks during each step, so registering a hook in one thread while
another thread steps would break that step. Therefore one pair of hooks is registered once per process; it does nothing
without followers. The followers are an immutable tuple that is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Follower = Callable[[Optimizer], None]

_followers: tuple[tuple[Follower | None, Follower | None], ...] = ()
_changing = threading.Lock()


def follow(before: Follower | None = None, after: Follower | None = None) -> Callable[[], None]:
    """Call these functions around every step from now on; returns a function that ends it.

    before: the optimizer is about to use the gradients
    after:  the optimizer has stepped
    """
    global _followers
    pair = (before, after)

    def unfollow() -> None:
        global _followers
        with _changing:
            _followers = tuple(other for other in _followers if other is not pair)

    with _changing:
        _followers = (*_followers, pair)
    return unfollow


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """torch's global pre-hook; `args` begins with the optimizer. Returns changed arguments, or None for no change."""
    followers = [before for before, _ in _followers if before is not None]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        for before in followers:
            before(optimizer)
    if closure is None or not followers:
        return None

    def followed() -> Any:
        loss = closure()
        for before in followers:
            before(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], followed, *args[2:]), kwargs
    return args, {**kwargs, "closure": followed}


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch's global post-hook."""
    for _, after in _followers:
        if after is not None:
            after(optimizer)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)

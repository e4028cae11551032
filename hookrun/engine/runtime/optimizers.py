"""Calls functions around each step of any optimizer in the process; and torch's optimizers without its compiler.

torch iterates over a dictionary of global step hooks during each step, so registering a hook in one thread while
another thread steps would break that step. Therefore one pair of hooks is registered once per process; it does nothing
without followers, and iterates over a copy of these.
"""

from __future__ import annotations

import copyreg
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookrun.engine.runtime.frames import outward

Follower = Callable[[Optimizer, Sequence[Tensor]], None]
"""Gets an optimizer that steps, and those of its parameters for which this is the outermost step.

A step inside another one (Lookahead, SAM, ZeroRedundancyOptimizer, `super().step()`) is a part of that one.
"""

_followers: dict[object, tuple[Follower | None, Follower | None]] = {}


def follow(before: Follower | None = None, after: Follower | None = None) -> Callable[[], object]:
    """Call these functions around every step from now on; returns a function that ends it.

    before: the optimizer is about to use the gradients
    after:  the optimizer has stepped
    """
    key = object()
    _followers[key] = before, after
    return partial(_followers.pop, key, None)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """torch's global pre-hook; `args` begins with the optimizer. Returns changed arguments, or None for no change."""
    followers = [before for before, _ in tuple(_followers.values()) if before is not None]
    stepped = _outermost(optimizer) if followers else []
    if not stepped:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        for before in followers:
            before(optimizer, stepped)
        return None

    def followed() -> Any:
        loss = closure()
        for before in followers:
            before(optimizer, stepped)
        return loss

    if len(args) > 1:
        return (args[0], followed, *args[2:]), kwargs
    return args, {**kwargs, "closure": followed}


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch's global post-hook."""
    followers = [after for _, after in tuple(_followers.values()) if after is not None]
    stepped = _outermost(optimizer) if followers else []
    if stepped:
        for after in followers:
            after(optimizer, stepped)


_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
"""torch's wrapper of every `step`, which calls the hooks."""


def _outermost(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of the optimizer, whose hook calls this, without those of the steps around its own."""
    steps = [frame.f_locals["self"] for frame in outward(sys._getframe(1)) if frame.f_code is _STEP]
    in_outer = set[int]()
    for outer in steps[1:]:
        in_outer.update(map(id, _parameters(outer)))
    return [parameter for parameter in _parameters(optimizer) if id(parameter) not in in_outer]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)


@cache
def without_compiler(cls: type) -> type:
    """A subclass of the optimizer class whose methods do not import torch's compiler; all else is the same.

    Its objects are pickled and copied as objects of torch's own class, so that reading them needs only torch. Methods
    without the known wrappers stay unchanged.
    """
    plain: dict[str, Any] = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        layer: Any = method
        while hasattr(layer, "__wrapped__"):  # from the outermost wrapper to the innermost
            if layer.__globals__.get("__name__") == "torch._compile":
                plain[name] = layer.__wrapped__
            elif layer.__code__.co_name == "_use_grad":
                plain[name] = _with_its_grad_mode(layer.__wrapped__)
            layer = layer.__wrapped__

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        return copyreg._reconstructor, (cls, object, None), self.__getstate__()  # type: ignore[attr-defined]

    plain |= {"__reduce_ex__": reduced, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), plain)


def _with_its_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own wrapper of an optimizer step, without its calls of the compiler."""

    def with_grad_mode(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    with_grad_mode.__name__ = step.__name__
    with_grad_mode.__doc__ = step.__doc__
    return with_grad_mode

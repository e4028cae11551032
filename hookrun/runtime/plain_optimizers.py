"""torch's optimizers without the import of its compiler.

Some of their methods import it only to tell it what to leave out, should it ever read them. That takes a second at each
start, and here nothing compiles an optimizer.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch


@cache
def without_compiler(cls: type) -> type:
    """The same class of optimizer, whose methods do not import torch's compiler; everything else is the same.

    What is pickled or copied is of torch's own class, so that whoever reads it needs nothing but torch.
    Where torch has written a method in another way than this knows, it stays as it is.
    """
    plain = dict[str, Any]()
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        for layer in _layers(method):
            if layer.__globals__.get("__name__") == "torch._compile":
                plain[name] = layer.__wrapped__
            elif layer.__code__.co_name == "_use_grad":
                plain[name] = _with_its_grad_mode(layer.__wrapped__)
    plain |= {"__reduce_ex__": _reduced_as(cls), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), plain)


def _reduced_as(cls: type) -> Callable[[Any, Any], tuple[Any, ...]]:
    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        return copyreg._reconstructor, (cls, object, None), self.__getstate__()  # type: ignore[attr-defined]

    return reduced


def _layers(method: Any) -> Iterator[Any]:
    """The wrappers around a method, from the outermost one to the last."""
    while hasattr(method, "__wrapped__"):
        yield method
        method = method.__wrapped__


def _with_its_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's own wrapper does for a step, but for its calls of the compiler."""

    def with_grad_mode(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    with_grad_mode.__name__, with_grad_mode.__doc__ = step.__name__, step.__doc__
    return with_grad_mode

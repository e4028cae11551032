"""torch's optimizers without the import of torch's compiler.

Some of their methods import the compiler only to exclude themselves from compilation. The import takes a second at each
start, and hookrun never compiles an optimizer.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def without_compiler(cls: type) -> type:
    """A subclass of the optimizer class whose methods do not import torch's compiler; all else is the same.

    Its objects are pickled and copied as objects of torch's own class, so that reading them needs only torch. Methods
    without the known wrappers stay unchanged.
    """
    plain = dict[str, Any]()
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

    with_grad_mode.__name__, with_grad_mode.__doc__ = step.__name__, step.__doc__
    return with_grad_mode

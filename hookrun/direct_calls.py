"""Calls of a module that has one forward hook and no other, without what torch does for hooks in general.

torch runs a module with any hook through code that serves all kinds of hooks, for ten times the price of the check
whether there are any. A direct call makes that check itself: where the one hook is all there is, it calls the module's
forward and then what the hook does. The hook stays registered with torch; whenever there is anything else (other hooks,
a compiler that reads the model, a trace, a backward pass, another thread) torch calls the module, and the hook, itself.

`Module.__call__` asks the module for `_compiled_call_impl` first, which `Module.compile` sets. torch leaves it out of
copies and pickles; `torch.compile` reads a direct call as it reads any function, and finds torch's own way in it. Where
a class copies its attributes another way (torch gives a parametrized module such a class), a deep copy or a pickle has
None there. A module that was given a copy of the `__dict__` (a replica of DataParallel) shares the dictionary of
forward hooks, whose references are counted: torch then calls the module itself. A copy of the `__dict__` with a
dictionary of hooks of its own is not noticed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from sys import getrefcount
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_NAME = "_compiled_call_impl"
_CALLER = nn.Module._wrapped_call_impl.__code__
_CALL_IMPL = nn.Module._call_impl
_NO_BACKWARD = -1

_tracing = torch.compiler.is_dynamo_compiling
_graph_task = torch._C._current_graph_task_id
_is_recorded = getattr(torch._C, "_is_tracing", torch._C._get_tracing_state)
"""Whether `torch.jit.trace` is under way."""


class _DirectCall(partial[Any]):
    """The function of a direct call, as the module's attribute: it belongs to that module alone."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """None in a deep copy or a pickle of the module's attributes."""
        return type(None), ()


def _references(self: nn.Module) -> int:
    """How many references Python counts for the module's forward hooks, in a function that has one of them."""
    hooks = self._forward_hooks
    return getrefcount(hooks)


_UNSHARED = _references(nn.Module())


@dataclass(frozen=True, slots=True)
class Direct:
    """What a direct call does to the module's output.

    fire:    output -> output
    forward: the class's own forward, where `fire` is for what that makes and does not write in place; None: any
    """

    fire: Callable[[Any], Any]
    forward: Callable[..., Any] | None = None


def call_directly(module: nn.Module, number: int, direct: Direct) -> Callable[[], None] | None:
    """Call the module directly from now on; a function that ends it, or None where the module is called another way.

    number: the id of the forward hook's handle
    """
    if not _is_called_by_torch(module):
        return None
    call = _DirectCall(_direct_call(module, number, direct.fire, direct.forward))
    module.__dict__[_NAME] = call

    def remove() -> None:
        if module.__dict__.get(_NAME) is call:  # the module may have been compiled since
            del module.__dict__[_NAME]

    return remove


def is_called_directly(module: nn.Module) -> bool:
    """Whether `_compiled_call_impl` is a direct call, and not what `Module.compile` made."""
    return isinstance(module.__dict__.get(_NAME), _DirectCall)


def call_through_torch(modules: Iterable[nn.Module]) -> None:
    """End the direct calls of these modules: a compiler would look at each of them again at every call of a graph."""
    for module in modules:
        if is_called_directly(module):
            del module.__dict__[_NAME]


def _is_called_by_torch(module: nn.Module) -> bool:
    """Whether it is called, copied and pickled as torch does it: a copy must not call the original."""
    kind = type(module)
    return (
        _NAME not in module.__dict__
        and kind._compiled_call_impl is None
        and kind._call_impl is _CALL_IMPL
        and kind.__getstate__ is nn.Module.__getstate__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__deepcopy__")
        and not hasattr(kind, "__copy__")
    )


def _direct_call(
    self: nn.Module, number: int, fire: Callable[[Any], Any], made_by: Callable[..., Any] | None
) -> Callable[..., Any]:
    thread = get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if _tracing():
            return self._call_impl(*args, **kwargs)
        if get_ident() != thread:  # DataParallel's threads call replicas, which share the attributes
            return _called(sys._getframe(1), self)._call_impl(*args, **kwargs)
        own, kind = self.__dict__, type(self)
        hooks = own["_forward_hooks"]  # faster than the attribute
        if getrefcount(hooks) != _UNSHARED:  # another module may have this one's attributes
            return _called(sys._getframe(1), self)._call_impl(*args, **kwargs)
        if (
            len(hooks) != 1
            or number not in hooks
            or kind._call_impl is not _CALL_IMPL  # somebody has wrapped or replaced it
            or "_call_impl" in own
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
            or _is_recorded()
            or _graph_task() != _NO_BACKWARD
        ):
            return self._call_impl(*args, **kwargs)
        if made_by is None:
            output = self.forward(*args, **kwargs)
        elif kind.forward is not made_by or "forward" in own or own.get("inplace"):
            return self._call_impl(*args, **kwargs)
        else:
            output = made_by(self, *args, **kwargs)
        hooks = self._forward_hooks
        if len(hooks) != 1 or number not in hooks or _global_forward_hooks:  # they have changed meanwhile
            return _after_forward(self, args, kwargs, output)
        return fire(output)

    return call


def _called(caller: Any, module: nn.Module) -> Any:
    """The module that is being called: the caller's own."""
    return caller.f_locals["self"] if caller.f_code is _CALLER else module


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """What torch does with forward hooks after the forward."""
    hooks = *_global_forward_hooks.items(), *module._forward_hooks.items()
    with_kwargs = module._forward_hooks_with_kwargs
    for number, hook in hooks:
        wants = number in with_kwargs or number in _global_with_kwargs
        new = hook(module, args, kwargs, output) if wants else hook(module, args, output)
        output = output if new is None else new
    return output


_global_with_kwargs = torch.nn.modules.module._global_forward_hooks_with_kwargs

CODE = next(
    constant for constant in _direct_call.__code__.co_consts if getattr(constant, "co_name", "") == "call"
)
"""Of every direct call: how a frame on the stack is known."""

"""Direct calls: faster calls of a module that has exactly one forward hook and no other hook.

torch calls a module with any hook through code for all kinds of hooks, which costs ten times as much as checking that
there are no hooks. A direct call makes that check itself: if the one hook is the only one, it calls the module's
forward and then the hook's function. The hook stays registered with torch. In all other cases (other hooks, a compiler
that traces the model, `torch.jit.trace`, a backward pass), torch's own code calls the module and the hook.

`Module.__call__` looks up `_compiled_call_impl` first, which `Module.compile` sets; a direct call is stored there.
torch leaves this attribute out of copies and pickles, and `torch.compile` traces a direct call into torch's own call.
For a class that copies its attributes differently (torch gives a parametrized module such a class), a deep copy or a
pickle has None there. A module that received a copy of the `__dict__` (a replica of DataParallel) shares the dictionary
of forward hooks: its reference count shows that, and torch's own code is used. A copied `__dict__` with its own
dictionary of hooks is not detected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import nn

from hookrun.engine.runtime.fast import private

_NAME = "_compiled_call_impl"
_NO_BACKWARD = -1

NAMES = (
    f"nn.Module.{_NAME}",
    "nn.Module._wrapped_call_impl",
    "nn.Module._call_impl",
    "_C._current_graph_task_id",
    "_C._get_tracing_state",
    "nn.modules.module._global_forward_hooks",
    "nn.modules.module._global_forward_hooks_with_kwargs",
    "nn.modules.module._global_forward_pre_hooks",
    "nn.modules.module._global_backward_hooks",
    "nn.modules.module._global_backward_pre_hooks",
)
(
    _,
    _WRAPPED_CALL,
    _CALL_IMPL,
    _graph_task,
    _jit_trace,
    _global_forward_hooks,
    _global_with_kwargs,
    _global_forward_pre_hooks,
    _global_backward_hooks,
    _global_backward_pre_hooks,
) = private(*NAMES)
_is_usable = _CALL_IMPL is not None

_tracing = torch.compiler.is_dynamo_compiling

_MAKERS: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Linear,
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh),
    }
)
"""torch's classes whose forward is one torch function that allocates its result, unless `inplace` is set.

Nothing else refers to such an output when a forward hook runs.
"""


def maker(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of such a module; None for any other module."""
    kind = type(module)
    if kind not in _MAKERS or vars(module).get("inplace"):
        return None
    return kind.forward


class _DirectCall(partial[Any]):
    """The function of a direct call, stored as an attribute of its module and never copied to another module.

    hooks_fire: by which `plan` tells it from the function that `Module.compile` stores there
    """

    __slots__ = ()
    hooks_fire = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a deep copy or a pickle of the module's attributes."""
        return type(None), ()


def _references(self: nn.Module) -> int:
    """The reference count of the module's dictionary of forward hooks, including one local variable."""
    hooks = self._forward_hooks
    return getrefcount(hooks)


_UNSHARED = _references(nn.Module())


def call_directly(
    module: nn.Module,
    number: int,
    fire: Callable[[Any], Any],
    made_by: Callable[..., Any] | None = None,
) -> object | None:
    """Start direct calls of the module; returns what `end` ends, or None if the module does not allow them.

    number:  the id of the forward hook's handle
    fire:    the hook's function, output -> output
    made_by: the class's forward, which takes one argument, if `fire` is only valid for its output (not computed in
             place); None: any forward
    """
    if not _is_called_by_torch(module):
        return None
    call = _DirectCall(_direct_call(module, number, fire, made_by))
    module.__dict__[_NAME] = call
    return call


def end(module: nn.Module, call: object) -> None:
    """End the direct calls of the module that `call_directly` has started."""
    if module.__dict__.get(_NAME) is call:  # the module may have been compiled in the meantime
        del module.__dict__[_NAME]


def call_through_torch(modules: Iterable[nn.Module]) -> None:
    """End the direct calls of these modules: a compiled graph would check guards for each of them at every call."""
    for module in modules:
        if isinstance(module.__dict__.get(_NAME), _DirectCall):
            del module.__dict__[_NAME]


def _is_called_by_torch(module: nn.Module) -> bool:
    """Whether the module uses torch's own call, copy and pickle methods: a copy must not call the original."""
    kind = type(module)
    return (
        _is_usable
        and _NAME not in module.__dict__
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
    def call(*args: Any, **kwargs: Any) -> Any:
        if _tracing():
            return self._call_impl(*args, **kwargs)
        own, kind = self.__dict__, type(self)
        hooks = own["_forward_hooks"]  # faster than the attribute
        if getrefcount(hooks) != _UNSHARED:  # a replica of DataParallel shares this one's attributes
            return _called(sys._getframe(1), self)._call_impl(*args, **kwargs)
        if (
            len(hooks) != 1
            or number not in hooks
            or kind._call_impl is not _CALL_IMPL  # other code has wrapped or replaced it
            or "_call_impl" in own
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
            or _jit_trace() is not None
            or _graph_task() != _NO_BACKWARD
        ):
            return self._call_impl(*args, **kwargs)
        if made_by is None:
            output = self.forward(*args, **kwargs)
        elif (
            kwargs or len(args) != 1 or kind.forward is not made_by or "forward" in own or own.get("inplace")
        ):
            return self._call_impl(*args, **kwargs)
        else:
            output = made_by(self, args[0])  # faster than *args
        hooks = own["_forward_hooks"]
        if (
            len(hooks) != 1 or number not in hooks or _global_forward_hooks
        ):  # the hooks have changed in the meantime
            return _after_forward(self, args, kwargs, output)
        return fire(output)

    return call


def _called(caller: Any, module: nn.Module) -> Any:
    """The module that is being called: `self` of the calling frame, if that is torch's; else `module`."""
    return caller.f_locals["self"] if caller.f_code is _WRAPPED_CALL.__code__ else module


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The output after all forward hooks, run as torch does after the forward."""
    hooks = *_global_forward_hooks.items(), *module._forward_hooks.items()
    with_kwargs = module._forward_hooks_with_kwargs
    for number, hook in hooks:
        wants = number in with_kwargs or number in _global_with_kwargs
        new = hook(module, args, kwargs, output) if wants else hook(module, args, output)
        output = output if new is None else new
    return output


CODE = next(
    constant for constant in _direct_call.__code__.co_consts if getattr(constant, "co_name", "") == "call"
)
"""The code object of every direct call, which identifies its frames on the stack."""

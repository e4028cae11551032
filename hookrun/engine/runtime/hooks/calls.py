"""`skip` and `stop_forward`, which act on the call of a module and not on a value.

`skip` needs a forward of the module's own, since torch looks the forward up before it runs any hook. `stop_forward`
raises an exception after all hooks of the module, which ends at the outermost call; the calls of the module and of
those around it are replaced, as for direct calls. A hook that does nothing is registered with torch all the same: where
a module has hooks, torch leaves out its fast paths, and without that hook (removed, paused, in a copy) nothing is
skipped or stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from threading import local
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hookrun.engine.runtime.call_stack import with_callers
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.compiled import tracing
from hookrun.engine.runtime.fast.direct_calls import call_through_torch
from hookrun.engine.runtime.frames import call_frame
from hookrun.engine.runtime.hooks.base import BoundHook, ModuleHook, Shared, fire
from hookrun.engine.runtime.snapshot import is_cache
from hookrun.engine.values.containers import form_changed
from hookrun.errors import HookError


class Replacement:
    """What takes the place of an attribute of a module while hooks need it, those of all installations.

    before: what the module itself had there
    """

    attribute: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = module.__dict__.get(self.attribute)
        self.hooks = list[Any]()

    @classmethod
    def add(cls, module: nn.Module, hook: CallHook) -> None:
        """Replace the attribute for a hook, until the hooks are removed."""
        replacement = module.__dict__.get(cls.attribute)
        if not isinstance(replacement, cls):
            replacement = module.__dict__[cls.attribute] = cls(module)
        replacement.hooks.append(hook)
        hook.shared.closing.callback(replacement.remove, hook)

    def remove(self, hook: CallHook) -> None:
        """Give the module its attribute back, if no other hook needs the replacement."""
        self.hooks.remove(hook)
        if not self.hooks and self.module.__dict__.get(self.attribute) is self:
            del self.module.__dict__[self.attribute]
            if self.before is not None:
                self.module.__dict__[self.attribute] = self.before


class CallHook(ModuleHook):
    """Base of the two.

    number:   the id of the registered hook
    unfilled: the caches that it has not let its module fill
    """

    number = -1

    def __init__(self, firings: Sequence[BoundHook], shared: Shared) -> None:
        super().__init__(firings, shared)
        self.unfilled = WeakSet[Any]()

    def mark(self, module: nn.Module, args: tuple[Any, ...], *output: Any) -> None:
        """torch's hook, which does nothing."""
        if tracing():  # a graph counts the call, or raises CompileError
            fire(self.firings, args)

    def is_due(self) -> bool:
        """Whether the schedule of a hook holds. All of them are asked, as each counts and may draw."""
        decided: bool = fire(self.firings, False)
        for firing in self.firings:
            firing.site.let_through |= not decided
        return decided


# ---- skip ----------------------------------------------------------------------------------------------------------


class SkippableForward(Replacement):
    """The forward of a module that hooks skip.

    A deep copy and a pickle of the module have one too, without hooks: it calls the forward of the copy.
    """

    attribute = "forward"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._first = next(iter(inspect.signature(module.forward).parameters), "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's first argument, or the output of its forward; a trial run compares the two."""
        called: Any = None if tracing() else call_frame().f_locals.get("self")
        shares = isinstance(called, nn.Module) and called.__dict__.get(self.attribute) is self
        module: Any = called if shares else self.module  # a shallow copy has the same attributes
        forward = self.before or partial(type(module).forward, module)
        hooks = [hook for hook in self.hooks if hook.number in self.module._forward_pre_hooks]
        if not hooks:
            return forward(*args, **kwargs)
        first = args[0] if args else kwargs.get(self._first)
        skipped = tracing() or any([hook.skips((*args, *kwargs.values())) for hook in hooks])
        site = hooks[0].firings[0].site
        if skipped and site.sink.has_values:
            return first
        output = forward(*args, **kwargs)
        if site.sink.has_values:
            return output
        changed = form_changed(output, first)
        if changed is not None:
            site.fail(f"its first argument cannot be its output: {changed}")
            return output
        return first if skipped else output


class Skip(CallHook):
    """`skip` of one module."""

    depth = 4

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Give the module a forward of its own."""
        handle = nn.Module.register_forward_pre_hook(module, self.mark)
        self.number = handle.id
        SkippableForward.add(module, self)
        yield handle

    def skips(self, arguments: Iterable[Any]) -> bool:
        """Whether the hooks skip this call. HookError where others wait for what a skipped call does not do."""
        site = self.firings[0].site
        skipped = self.is_due()
        for cache in filter(is_cache, arguments):
            if cache in self.unfilled:
                raise HookError(
                    f"{site.where}: an earlier pass skipped it and did not fill its part of the cache, from which the "
                    "model would now take keys, values or the number of tokens: generate without a cache "
                    "(use_cache=False, task.cache=false)"
                )
            if skipped:
                self.unfilled.add(cache)
        if not skipped or not torch.is_grad_enabled():
            return skipped
        ddp = DistributedDataParallel._get_active_ddp_module()
        waits = ddp is not None and not (ddp.find_unused_parameters or ddp.static_graph)
        if waits and any(parameter.requires_grad for parameter in site.module.parameters()):
            raise HookError(
                f"{site.where}: DistributedDataParallel waits for the gradients of its parameters, which a skipped "
                "call does not use: wrap the model with find_unused_parameters=True"
            )
        return skipped


# ---- stop_forward --------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Ends a forward; nothing else should catch it. There is one for each call, before it is raised.

    where: the hook that raised it last
    times: how often it was raised, and not caught by the call
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("the forward ends here")
        self.module = module
        self.where = ""
        self.times = 0


class _Thread(local):
    """The calls of one thread that can be stopped; they end by `finally`, outside of torch's call."""

    def __init__(self) -> None:
        self.calls = list[Stopped]()


_thread = _Thread()


class StoppableCall(Replacement):
    """The call of a module after which hooks stop the forward, or of one around it, at which it ends.

    hooks_fire: by which `plan` tells it from the function that `Module.compile` stores there
    """

    attribute = "_compiled_call_impl"
    hooks_fire = True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # also in a deep copy of the module's attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module, or None if the forward ends here."""
        if tracing():
            return self.module._call_impl(*args, **kwargs)
        calls = _thread.calls
        stop = Stopped(self.module)
        calls.append(stop)
        try:
            output = self.module._call_impl(*args, **kwargs)
            for hook in self.hooks:
                hook.after_call(self.module, calls)
        except Stopped as stopped:
            if stopped is not stop:
                raise
            output = None
            stop.times -= 1
        finally:
            calls.pop().__traceback__ = None  # it refers to this frame, and to all values of the forward
        if stop.times:
            raise HookError(
                f"{stop.where}: code of the model around it has caught the exception that ends the forward, so the "
                "model has gone on: stop at another module, or let the model catch less than Exception"
            )
        return output


class Stop(CallHook):
    """`stop_forward` of one module."""

    depth = -1

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Replace the calls of the module and of those around it, at one of which the forward ends."""
        handle = nn.Module.register_forward_hook(module, self.mark)
        self.number = handle.id
        self._ends_at = with_callers(self.shared.model, [module])
        call_through_torch(self._ends_at.values())
        for called in self._ends_at.values():
            StoppableCall.add(called, self)
        yield handle

    def after_call(self, module: nn.Module, calls: Sequence[Stopped]) -> None:
        """Raise Stopped, unless no schedule holds, or activation checkpointing repeats the call."""
        if self.number not in module._forward_hooks or repeating() is not None or not self.is_due():
            return
        if torch.compiler.is_exporting():
            self.firings[0].traced(None)  # raises CompileError
        ending = next(call for call in calls if id(call.module) in self._ends_at)
        ending.where = self.firings[0].site.where
        ending.times += 1
        raise ending

"""`weight`: a parameter as the forward of its module reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hookrun.errors import HookError, Problem
from hookrun.hook_types import WEIGHT
from hookrun.plan.model_tree import parametrized
from hookrun.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.runtime.clock import call_frame, finished
from hookrun.runtime.compiled import refusal, tracing
from hookrun.runtime.hooks.base import BoundHook, ModuleHook, Shared, in_backward, in_graph
from hookrun.runtime.sharded import is_sharded

_ABSENT = object()
_LISTS = "parametrizations"
_OF_RECURRENT = ("_flat_weights", "_flat_weight_refs")
"""Attributes of torch's recurrent layers, which they renew when a weight is another tensor than at the last call."""


@dataclass
class Reading:
    """A call of a module that reads edited parameters.

    before: what the module's `__dict__` had under the names of the attributes that are set during the call
    """

    module: nn.Module
    frame: FrameType
    thread: int = field(default_factory=get_ident)
    before: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the module until the call ends."""
        attributes = self.module.__dict__
        self.before.setdefault(name, attributes.get(name, _ABSENT))
        attributes[name] = value

    def end(self) -> None:
        """Give the module its attributes back."""
        for name, value in self.before.items():
            if value is _ABSENT:
                self.module.__dict__.pop(name, None)
            else:
                self.module.__dict__[name] = value


class Weight(ModuleHook):
    """Shadows parameters of the module during a call of its forward.

    An attribute in the `__dict__` of a module is found before its parameter of the same name, which stays where it is:
    `state_dict`, `parameters()` and optimizers never meet the edited tensor.
    """

    hook_types = (WEIGHT,)
    depth = 3

    def __init__(self, firings: Sequence[BoundHook] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self._by_name, problems = defaultdict[str, list[BoundHook]](list), list[Problem]()
        for firing in firings:
            site, name = firing.site, firing.site.path.rpartition(".")[2]
            self._by_name[name].append(firing)
            if name in parametrized(site.module):
                why = f"edits {site.path}, and a graph cannot contain edits of a parametrized parameter"
                problems.append(
                    Problem(
                        site.spec.where, why, f"run it without compiling, or leave it out: ~{site.spec.where}"
                    )
                )
        self._refused = refusal(problems)
        self._readings = list[Reading]()  # the innermost last

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that runs after those that change the arguments."""
        yield module.register_forward_pre_hook(self.enter)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that is also called when the forward raised."""
        yield module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if tracing():
            for name, firings in self._by_name.items():
                if name not in module._parameters:
                    self._refused.fire(None)  # raises CompileError
                module.__dict__[name] = in_graph(firings, module._parameters[name])
            return
        # after KeyboardInterrupt and SystemExit torch runs no forward hooks
        while self._readings and finished(self._readings[-1].frame):
            self._readings.pop().end()
        reading = Reading(module, call_frame())
        self._readings.append(reading)
        if any(other.thread != reading.thread for other in self._readings):
            self._readings.remove(reading)
            raise HookError(
                f"{self.firings[0].site.where}: two threads call the module at the same time, and each would read the "
                "parameter as it is edited for the other: call it in one thread, or give each thread a copy"
            )
        for name in _OF_RECURRENT:
            if name in module.__dict__:
                reading.set(name, module.__dict__[name])
        lists: dict[str, Any] = dict(getattr(module._modules.get(_LISTS), "items", dict)())
        for name, firings in self._by_name.items():
            stored = self._stored(module, name, firings)
            new = stored
            if graph_task() != NO_BACKWARD:
                new = in_backward(firings, stored)
            else:
                for firing in firings:
                    new = firing.op(new)
            if name in lists:
                lists[name] = lambda new=new: new
                reading.set(_LISTS, lists)
            elif new is not stored or len(self._readings) > 1:
                reading.set(name, new)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if tracing():
            for name in self._by_name:
                del module.__dict__[name]
            return
        frame = call_frame()
        while any(reading.frame is frame for reading in self._readings):
            self._readings.pop().end()

    def clear(self) -> None:
        """Drop all firings, and end the readings that an exception has left open."""
        super().clear()
        self._by_name.clear()
        while self._readings:
            self._readings.pop().end()

    def _stored(self, module: nn.Module, name: str, firings: Sequence[BoundHook]) -> Tensor:
        """The parameter without our edits: the module's own, that of `functional_call`, or a parametrized one."""
        if (parameter := module._parameters.get(name)) is None:
            what = "the module has no parameter of this name any more: install the hooks afterwards"
            if name in (lists := parametrized(module)):
                if not parametrize._cache_enabled:
                    value: Tensor = lists[name]()
                    return value
                what = "torch.nn.utils.parametrize.cached() keeps one tensor for all calls: leave it out"
            raise HookError(f"{firings[0].site.where}: {what}")
        if is_sharded(parameter):
            raise HookError(
                f"{firings[0].site.where}: in this call the parameter is a DTensor: leave the hook out"
            )
        return parameter

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

_ABSENT = object()
_LISTS = "parametrizations"
_OF_RECURRENT = ("_flat_weights", "_flat_weight_refs")
"""Attributes of torch's recurrent layers, which they renew when a weight is another tensor than at the last call."""


@dataclass(eq=False)
class Reading:
    """A call of a module that reads edited parameters; all installations share it.

    edited: the tensors that the call reads, by name
    before: what the module's `__dict__` had under the names of the attributes that are set during the call
    """

    module: nn.Module
    frame: FrameType
    thread: int = field(default_factory=get_ident)
    edited: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)

    def show(self, name: str, tensor: Tensor) -> None:
        """Let the forward read the tensor as the parameter of that name."""
        self.edited[name] = tensor
        if name in self.module._parameters:
            self.set(name, tensor)
        else:
            lists: Any = self.module.parametrizations
            self.set(_LISTS, {**dict(lists.items()), name: lambda: tensor})

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the module until the call ends."""
        attributes = self.module.__dict__
        self.before.setdefault(name, attributes.get(name, _ABSENT))
        attributes[name] = value

    def end(self) -> None:
        """Give the module its attributes back."""
        _open.remove(self)
        for name, value in self.before.items():
            self.module.__dict__[name] = value
            if value is _ABSENT:
                del self.module.__dict__[name]


_open = list[Reading]()
"""The current readings of all threads, of each module the innermost last."""


def _of(module: nn.Module) -> list[Reading]:
    return [reading for reading in _open if reading.module is module]


class Weight(ModuleHook):
    """Shadows parameters of the module during a call of its forward.

    An attribute in the `__dict__` of a module is found before its parameter of the same name, which stays where it is:
    `state_dict`, `parameters()` and optimizers never meet the edited tensor.
    """

    hook_types = (WEIGHT,)
    depth = 3

    def __init__(self, firings: Sequence[BoundHook] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self._by_name = defaultdict[str, list[BoundHook]](list)
        for firing in firings:
            self._by_name[firing.site.path.rpartition(".")[2]].append(firing)
        why = (
            "a graph cannot contain this edit: the parameter is parametrized, or edited twice at once, because its "
            "module calls itself or is hooked by two installations"
        )
        hint = "run it without compiling, or put all hooks into one installation"
        self._refused = refusal([Problem(firing.site.spec.where, why, hint) for firing in firings[:1]])

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
                if name in module.__dict__ or name not in module._parameters:
                    self._refused.fire(None)  # raises CompileError
                module.__dict__[name] = in_graph(firings, module._parameters[name])
            return
        reading = self._begin(module)
        for name, firings in self._by_name.items():
            stored = reading.edited.get(name)
            stored = self._stored(module, name) if stored is None else stored
            new = stored
            if graph_task() != NO_BACKWARD:
                new = in_backward(firings, stored)
            else:
                for firing in firings:
                    new = firing.op(new)
            reading.show(name, new)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if tracing():
            for name in self._by_name:
                del module.__dict__[name]
            return
        frame = call_frame()
        for reading in _of(module):
            if reading.frame is frame:
                reading.end()

    def clear(self) -> None:
        """Drop all firings, and end the readings that an exception has left open, also one in a broken graph."""
        for firing in self.firings:
            module, name = firing.site.module, firing.site.path.rpartition(".")[2]
            for reading in reversed(_of(module)):
                reading.end()
            if name in module._parameters:
                module.__dict__.pop(name, None)
        super().clear()
        self._by_name.clear()

    def _begin(self, module: nn.Module) -> Reading:
        """The reading of the current call, which another installation may have begun."""
        frame, around = call_frame(), _of(module)
        # after KeyboardInterrupt and SystemExit torch runs no forward hooks
        while around and finished(around[-1].frame):
            around.pop().end()
        if around and around[-1].frame is frame:
            return around[-1]
        reading = Reading(module, frame)
        _open.append(reading)
        if any(other.thread != reading.thread for other in _of(module)):
            reading.end()
            raise HookError(
                f"{self.firings[0].site.where}: two threads call the module at the same time, and each would read the "
                "parameter as it is edited for the other: call it in one thread, or give each thread a copy"
            )
        for name in module.__dict__.keys() & _OF_RECURRENT:
            reading.set(name, module.__dict__[name])
        return reading

    def _stored(self, module: nn.Module, name: str) -> Tensor:
        """The parameter without our edits: the module's own, that of `functional_call`, or a parametrized one."""
        stored: Tensor | None = module._parameters.get(name)
        if stored is None and name in (lists := parametrized(module)) and not parametrize._cache_enabled:
            stored = lists[name]()
        if stored is None:
            raise HookError(
                f"{self._by_name[name][0].site.where}: the module has no such parameter now, or one tensor for all "
                "calls: install the hooks afterwards, and leave out torch.nn.utils.parametrize.cached()"
            )
        return stored

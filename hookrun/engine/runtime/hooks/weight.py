"""`weight`: a parameter as the forward of its module reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookrun.engine.hook_types import WEIGHT
from hookrun.engine.plan.model_tree import parametrized
from hookrun.engine.runtime.compiled import refusal, tracing
from hookrun.engine.runtime.frames import call_frame, left_open
from hookrun.engine.runtime.hooks.base import AroundForward, BoundHook, Shared, fire
from hookrun.errors import HookError, Problem

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
        for name, value in self.before.items():
            self.module.__dict__[name] = value
            if value is _ABSENT:
                del self.module.__dict__[name]


_open = dict[FrameType, Reading]()
"""The current readings of all threads, by the frames of the calls, the innermost last."""


class Weight(AroundForward):
    """Shadows parameters of the module during a call of its forward.

    An attribute in the `__dict__` of a module is found before its parameter of the same name, which stays where it is:
    `state_dict`, `parameters()` and optimizers never meet the edited tensor.
    """

    hook_types = (WEIGHT,)
    depth = 3

    def __init__(self, firings: Sequence[BoundHook], shared: Shared) -> None:
        super().__init__(firings, shared)
        self._by_name = defaultdict[str, list[BoundHook]](list)
        for firing in firings:
            self._by_name[firing.site.path.rpartition(".")[2]].append(firing)
        refused = (
            "a graph cannot contain this edit: the parameter is parametrized, or edited twice at once, because its "
            "module calls itself or is hooked by two installations",
            "run it without compiling, or put all hooks into one installation",
        )
        self._refused = refusal([Problem(firing.site.spec.where, *refused) for firing in firings[:1]])

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch's forward pre-hook, registered with kwargs."""
        if not self.firings:
            return
        if tracing():
            for name, firings in self._by_name.items():
                if name in module.__dict__ or name not in module._parameters:
                    self._refused(None)  # raises CompileError
                module.__dict__[name] = fire(firings, module._parameters[name])
            return
        for left in left_open(_open):
            left.end()
        frame = call_frame()
        reading = _open.get(frame) or self._begin(module, frame)  # another installation may have begun it
        for name, firings in self._by_name.items():
            stored = reading.edited.get(name)
            reading.show(name, fire(firings, self._stored(module, name) if stored is None else stored))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if not self.firings:
            return
        if tracing():
            for name in self._by_name:
                del module.__dict__[name]
            return
        if (reading := _open.pop(call_frame(), None)) is not None:
            reading.end()

    def clear(self) -> None:
        """Drop all firings, and end the readings that an exception has left open, also one in a broken graph."""
        for firing in self.firings:
            module, name = firing.site.module, firing.site.path.rpartition(".")[2]
            for frame in [frame for frame, reading in reversed(_open.items()) if reading.module is module]:
                _open.pop(frame).end()
            if name in module._parameters:
                module.__dict__.pop(name, None)
        super().clear()

    def _begin(self, module: nn.Module, frame: FrameType) -> Reading:
        reading = _open[frame] = Reading(module)
        around = [other for other in tuple(_open.values()) if other.module is module]
        if any(other.thread != reading.thread for other in around):
            del _open[frame]
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

"""`weight`: a parameter as the forward of its module reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookrun.engine.hook_types import WEIGHT
from hookrun.engine.plan.model_tree import parametrized
from hookrun.engine.runtime.call_stack import OpenCall, begin_call, end_call
from hookrun.engine.runtime.compiled import refusal, tracing
from hookrun.engine.runtime.hooks.base import AroundForward, BoundHook, Shared, fire
from hookrun.errors import HookError, Problem

_ABSENT = object()
_LISTS = "parametrizations"
_OF_RECURRENT = ("_flat_weights", "_flat_weight_refs")
"""Attributes of torch's recurrent layers, which they renew when a weight is another tensor than at the last call."""


@dataclass(eq=False)
class WeightReading:
    """A call of a module that reads edited parameters; all installations share it.

    edited: the tensors that the call reads, by name
    before: what the module's `__dict__` had under the names of the attributes that are set during the call
    """

    call: OpenCall
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
        """Give the module its attributes back, unless that was done."""
        if self not in _readings:
            return
        _readings.remove(self)
        for name, value in self.before.items():
            self.module.__dict__[name] = value
            if value is _ABSENT:
                del self.module.__dict__[name]


_readings: list[WeightReading] = []
"""The current readings of all threads, the innermost of each thread last."""


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
        call = begin_call(self)
        call.kept[self] = reading = self._reading(call, module)
        for name, firings in self._by_name.items():
            stored = reading.edited.get(name)
            if stored is None:
                stored = self._stored(module, name)
            reading.show(name, fire(firings, stored))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """torch's forward hook, called also when the forward raised."""
        if not self.firings:
            return
        if tracing():
            for name in self._by_name:
                del module.__dict__[name]
            return
        reading: WeightReading | None = end_call(self)
        if reading is not None:
            reading.end()

    def clear(self) -> None:
        """Drop all firings, and end the readings that an exception has left open, also one in a broken graph."""
        for firing in self.firings:
            module = firing.site.module
            name = firing.site.path.rpartition(".")[2]
            for reading in reversed(tuple(_readings)):
                if reading.module is module:
                    reading.end()
            if name in module._parameters:
                module.__dict__.pop(name, None)
        super().clear()

    def abandon(self, kept: WeightReading) -> None:
        """Give the module its attributes back."""
        kept.end()

    def _reading(self, call: OpenCall, module: nn.Module) -> WeightReading:
        """The reading of a call, which another installation may have begun."""
        for kept in call.kept.values():
            if isinstance(kept, WeightReading):
                return kept
        for other in reversed(tuple(_readings)):
            if other.module is not module or other.thread == get_ident():
                continue
            if not other.call.ended:
                raise HookError(
                    f"{self.firings[0].site.where}: two threads call the module at the same time, and each would read "
                    "the parameter as it is edited for the other: call it in one thread, or give each thread a copy"
                )
            other.end()
        reading = WeightReading(call, module)
        _readings.append(reading)
        for name in module.__dict__.keys() & _OF_RECURRENT:
            reading.set(name, module.__dict__[name])
        return reading

    def _stored(self, module: nn.Module, name: str) -> Tensor:
        """The parameter without our edits: the module's own, that of `functional_call`, or a parametrized one."""
        stored: Tensor | None = module._parameters.get(name)
        if stored is None and not parametrize._cache_enabled:
            lists = parametrized(module)
            if name in lists:
                stored = lists[name]()
        if stored is None:
            raise HookError(
                f"{self._by_name[name][0].site.where}: the module has no such parameter now, or one tensor for all "
                "calls: install the hooks afterwards, and leave out torch.nn.utils.parametrize.cached()"
            )
        return stored

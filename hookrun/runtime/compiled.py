"""Hooks inside a compiled graph: functions of tensors alone, so that a run does not trigger recompilation.

The graph adds to a tensor that counts the firings, and reads a tensor that says whether the schedule holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hookrun.errors import CompileError
from hookrun.plan.graph_support import uncompilable
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime.apply_action import acts_on, function_of
from hookrun.runtime.site import HookSite
from hookrun.values import containers

tracing = torch.compiler.is_dynamo_compiling
"""Whether torch.compile is tracing the hooks instead of running them."""


class InGraph(Protocol):
    """What a site does inside a graph."""

    def fire(self, value: Any) -> Any:
        """The value after the action, if the schedule holds; else the value."""

    def watch(self, tensor: Tensor) -> None:
        """Act on the gradient of the tensor."""


class Traced:
    """A site inside a graph; its action is a function of tensors.

    fired: how often it fired, a 0-dimensional tensor; hooks on a gradient are counted when they are attached
    open:  whether its schedule holds at this step and epoch, a 0-dimensional tensor; None if it always does
    fire:  value -> the value after the action, if the schedule holds
    """

    def __init__(self, site: HookSite, *, targeted: bool) -> None:
        keys = site.spec.keys
        self.site = site
        self.fired = torch.zeros((), dtype=torch.int64, device=_device(site))
        self.open: Tensor | None = None
        holds_in = {training: keys.when.holds_in(training) for training in (True, False)}
        path = keys.target.keys if keys.target is not None and targeted else None
        if keys.when.step is not None or keys.when.epoch is not None:
            self.open = torch.tensor(False, device=_device(site))
            self.reschedule()
        self._counts = _Counting(site, holds_in, self.fired, self.open)
        self._edited = _TracedEdit(site, path, self.open)
        always = self._edited.is_plain and all(holds_in.values())
        # Neither refers to this object: a reference cycle would keep the model until garbage collection.
        self.fire = (_fire_always if always else _fire_as_scheduled)(self._counts, self._edited)

    def reschedule(self) -> None:
        """Update the schedule tensors after a change of step or epoch."""
        if self.open is not None:
            clock = self.site.clock
            self.open.fill_(self.site.spec.keys.when.holds_at(clock.step, clock.epoch))

    def watch(self, tensor: Tensor) -> None:
        """Act on the gradient of the tensor."""
        if self._counts():
            tensor.register_hook(self._edited)


class _Counting:
    """Counts a firing and returns True, if the site fires in the model's mode. torch compiles a graph per mode."""

    def __init__(
        self, site: HookSite, holds_in: dict[bool, bool], fired: Tensor, is_open: Tensor | None
    ) -> None:
        self.fired = fired
        self._site = site
        self._holds_in = holds_in
        self._open = is_open

    def __call__(self) -> bool:
        if not self._holds_in[self._site.clock.model.training]:
            return False
        self.fired.add_(1 if self._open is None else self._open)
        return True


class _TracedEdit:
    """Applies a site's action to a value; the result is used where `is_open` is true or None.

    is_plain: the action is a function of one tensor, has no target and is always scheduled
    """

    def __init__(self, site: HookSite, path: tuple[str | int, ...] | None, is_open: Tensor | None) -> None:
        self.function = function_of(site)
        self._path = path
        self._together = site.spec.action.scope == "together"
        self._open = is_open
        self.is_plain = path is None and not self._together and is_open is None

    def __call__(self, value: Any) -> Any:
        member = value if self._path is None else containers.get(value, self._path)
        if self._together:
            olds = [leaf for leaf in containers.tensors(member) if acts_on(leaf)]
            news = dict(zip(map(id, olds), self.function(olds), strict=True)) if olds else {}
            changed = _rebuilt(member, lambda leaf: self._chosen(leaf, news.get(id(leaf))))
        else:
            changed = _rebuilt(
                member, lambda leaf: self._chosen(leaf, self.function(leaf)) if acts_on(leaf) else leaf
            )
        return changed if self._path is None else containers.put(value, self._path, changed)

    def _chosen(self, old: Any, new: Tensor | None) -> Any:
        if new is None:
            return old
        return new if self._open is None else torch.where(self._open, new, old)


def _fire_as_scheduled(counts: _Counting, edited: _TracedEdit) -> Callable[[Any], Any]:
    return lambda value: edited(value) if counts() else value


def _fire_always(counts: _Counting, edited: _TracedEdit) -> Callable[[Any], Any]:
    """The same for a site without conditions, with few variables: each one becomes a guard, checked at every call."""
    function, fired = edited.function, counts.fired

    def fire(value: Any) -> Any:
        fired.add_(1)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return edited(value)
        new = function(value)
        return value if new is None else new

    return fire


class Refused:
    """A site of a plan that cannot be part of a graph."""

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def fire(self, value: Any) -> Any:
        """Raise CompileError."""
        self._refuse()

    def watch(self, tensor: Tensor) -> None:
        """Raise CompileError."""
        self._refuse()


class Tracing:
    """The sites of one installation inside compiled graphs."""

    def __init__(self, plan: ResolvedPlan) -> None:
        self._problems = problems = uncompilable(plan)
        self._traced = dict[int, Traced]()

        def refuse() -> NoReturn:
            # loaded already, since torch._dynamo is the caller
            from torch._dynamo.exc import TorchRuntimeError

            class Uncompilable(CompileError, TorchRuntimeError):
                """A TorchRuntimeError, so that torch passes it on unchanged to the caller of the compiled model."""

            raise Uncompilable(problems)  # not self._problems, which would form a reference cycle

        refuse._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while tracing, not in the graph
        self._refused = Refused(refuse)

    def of(self, site: HookSite, *, targeted: bool) -> InGraph:
        """What the site does inside a graph."""
        if self._problems or not site.hook_type.graph.inside:
            return self._refused
        traced = self._traced[id(site)] = Traced(site, targeted=targeted)
        return traced

    def reschedule(self) -> None:
        """Update the schedule tensors after a change of step or epoch."""
        for traced in self._traced.values():
            traced.reschedule()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Firings inside the block are not counted."""
        before = [(traced, traced.fired.clone()) for traced in self._traced.values()]
        try:
            yield
        finally:
            for traced, fired in before:
                traced.fired.copy_(fired)

    def fired(self, site: HookSite) -> int:
        """How often the site fired inside graphs."""
        traced = self._traced.get(id(site))
        return 0 if traced is None else int(traced.fired)

    def recount(self, site: HookSite, fired: int) -> None:
        """Set how often the site fired inside graphs; added to `site.fired` if it cannot be in a graph now."""
        traced = self._traced.get(id(site))
        if traced is None:
            site.fired += fired
        else:
            traced.fired.fill_(fired)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` applied to every member that is not a container; all containers are new.

    `containers.rebuild` keeps unchanged containers, but torch.compile cannot trace its `is` comparison of tuples.
    """
    members = containers.children(value)
    if not members:
        return change(value)
    return containers.replaced(value, {key: _rebuilt(member, change) for key, member in members})


def _device(site: HookSite) -> torch.device:
    """The device on which the module's values most likely are: a graph with tensors on several devices is slower."""
    nearby = chain(
        site.module.parameters(), site.module.buffers(), site.clock.model.parameters(), [torch.empty(0)]
    )
    return next(nearby).device

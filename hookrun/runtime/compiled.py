"""Hooks inside a compiled graph: functions of tensors alone, so that nothing compiles again while a run goes on.

How often a hook fired is a tensor that the graph adds to; whether its schedule holds is a tensor that the graph reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hookrun import containers
from hookrun.errors import CompileError
from hookrun.plan.graph_support import uncompilable
from hookrun.plan.plan import ResolvedPlan
from hookrun.runtime.apply_action import acts_on, function_of
from hookrun.runtime.site import PlacedHook

tracing = torch.compiler.is_dynamo_compiling
"""Whether torch.compile is reading the hooks, not running them."""


class InGraph(Protocol):
    """What a site does inside a graph."""

    def fire(self, value: Any) -> Any:
        """The value after the action, where the schedule holds."""

    def watch(self, tensor: Tensor) -> None:
        """Act on the gradient of the tensor."""


class Traced:
    """A site whose action is a function of tensors.

    fired: how often it fired, a tensor of no dimensions; a gradient counts where its tensor was made
    open:  whether its schedule holds at this step and epoch; None where it always does
    fire:  gives the value after the action, where the schedule holds
    """

    def __init__(self, site: PlacedHook, *, targeted: bool) -> None:
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
        # Neither refers to this object: a cycle would keep the model until Python's collector comes.
        self.fire = (_fire_always if always else _fire_as_scheduled)(self._counts, self._edited)

    def reschedule(self) -> None:
        """The step or the epoch is another one now."""
        if self.open is not None:
            clock = self.site.clock
            self.open.fill_(self.site.spec.keys.when.holds_at(clock.step, clock.epoch))

    def watch(self, tensor: Tensor) -> None:
        """Act on the gradient of the tensor."""
        if self._counts():
            tensor.register_hook(self._edited)


class _Counting:
    """Whether a site fires in the model's mode, for each of which there is a graph; counted if so."""

    def __init__(
        self, site: PlacedHook, holds_in: dict[bool, bool], fired: Tensor, is_open: Tensor | None
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
    """The value after a site's action, which comes into force where `is_open` is true or None.

    is_plain: the action is a function of one tensor, on the whole value, that is always in force
    """

    def __init__(self, site: PlacedHook, path: tuple[str | int, ...] | None, is_open: Tensor | None) -> None:
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
    """The same in few names: at each call of a graph torch looks again at every one that was read for it."""
    function, fired = edited.function, counts.fired

    def fire(value: Any) -> Any:
        fired.add_(1)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return edited(value)
        new = function(value)
        return value if new is None else new

    return fire


class Refused:
    """A site of a plan that no graph can hold."""

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def fire(self, value: Any) -> Any:
        """Raise CompileError."""
        self._refuse()

    def watch(self, tensor: Tensor) -> None:
        """Raise CompileError."""
        self._refuse()


class Tracing:
    """What the sites of one installation do inside a graph."""

    def __init__(self, plan: ResolvedPlan) -> None:
        self._problems = problems = uncompilable(plan)
        self._traced = dict[int, Traced]()

        def refuse() -> NoReturn:
            from torch._dynamo.exc import TorchRuntimeError  # there, as it is what calls

            class Uncompilable(CompileError, TorchRuntimeError):
                """As a TorchRuntimeError it reaches the caller of the compiled model as it is."""

            raise Uncompilable(problems)  # and not self's: what it holds would hold it

        refuse._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while reading, not put into a graph
        self._refused = Refused(refuse)

    def of(self, site: PlacedHook, *, targeted: bool) -> InGraph:
        """What the site does inside a graph."""
        if self._problems or not site.hook_type.graph.inside:
            return self._refused
        traced = self._traced[id(site)] = Traced(site, targeted=targeted)
        return traced

    def reschedule(self) -> None:
        """The step or the epoch is another one now."""
        for traced in self._traced.values():
            traced.reschedule()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What fires inside does not count."""
        before = [(traced, traced.fired.clone()) for traced in self._traced.values()]
        try:
            yield
        finally:
            for traced, fired in before:
                traced.fired.copy_(fired)

    def fired(self, site: PlacedHook) -> int:
        """How often the site fired inside graphs."""
        traced = self._traced.get(id(site))
        return 0 if traced is None else int(traced.fired)

    def recount(self, site: PlacedHook, fired: int) -> None:
        """The site has fired so often inside graphs; where none can hold it now, that counts as any firing."""
        traced = self._traced.get(id(site))
        if traced is None:
            site.fired += fired
        else:
            traced.fired.fill_(fired)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` applied to every member that is not a container, in containers that are all new.

    `containers.rebuild` keeps those in which nothing changed, but whether two tuples are the same can't be asked here.
    """
    members = containers.children(value)
    if not members:
        return change(value)
    return containers.replaced(value, {key: _rebuilt(member, change) for key, member in members})


def _device(site: PlacedHook) -> torch.device:
    """Where the module's values are, most likely: a graph whose tensors lie on several devices is slower."""
    nearby = chain(
        site.module.parameters(), site.module.buffers(), site.clock.model.parameters(), [torch.empty(0)]
    )
    return next(nearby).device

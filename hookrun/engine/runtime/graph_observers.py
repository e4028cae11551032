"""Observers inside compiled graphs: an operator of hookrun's gives what they see to Python while the graph runs.

The compiler cannot look into the operator, so it breaks no graph. It declares that it writes `token`: therefore it is
neither left out nor repeated nor put in another order, also in a backward pass and where activation checkpointing
computes a part of the graph again. What a hook does with the numbers, and whether its schedule holds, is Python's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookrun.engine.actions.base import Halves
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import Op, unscaled_leaf
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values import containers
from hookrun.engine.values.private_names import require
from hookrun.engine.values.tensors import ordinary_tensors

_SCHEMA = "observed(Tensor token, Tensor[] tensors, int firing) -> ()"

_numbers = count()
_open = WeakValueDictionary[int, "GraphObservers"]()


@dataclass(frozen=True, slots=True)
class _Firing:
    """A firing of a hook in a graph, each time the graph runs.

    within: path of the tensor that the hook is attached to
    paths:  of the tensors that it sees, below `within`
    call:   the number of the module's call
    """

    observer: _Observer
    within: str
    paths: tuple[str, ...]
    call: int


class GraphObservers:
    """The observers of one installation, in all of its graphs.

    token: [] int64 on the CPU, the number of this object; graphs have numbers only, so that they can be cached

    refuse_export: raises CompileError with what an exported program cannot contain
    """

    def __init__(self, refuse_export: Op) -> None:
        self.refuse_export = refuse_export
        number = next(_numbers)
        with ordinary_tensors():
            self.token = torch.tensor(number, device="cpu")
        self._firings: list[_Firing] = []
        self._calls = Counter[HookSite]()
        self._trace: object = None
        _open[number] = self

    def add(self, site: HookSite) -> Op:
        """What an observer does inside a graph, see `in_graph_of`."""
        observer = _Observer(self, site)
        return observer.watch if site.hook_type is OUTPUT_GRAD else observer.see

    def number(self, observer: _Observer, paths: tuple[str, ...]) -> int:
        """A number for a firing in the graph that is traced now; for gradients the first of one for each path."""
        from torch._guards import TracingContext

        trace = TracingContext.try_get()
        if trace is not self._trace:
            self._trace = trace
            self._calls.clear()
        site = observer.site
        call = 0 if site.calls is None else self._calls[site]
        self._calls[site] += 1
        first = len(self._firings)
        if site.hook_type is OUTPUT_GRAD:
            self._firings += [_Firing(observer, path, ("",), call) for path in paths]
        else:
            self._firings.append(_Firing(observer, "", paths, call))
        return first

    def receive(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Let the hook act on what it sees; the graph is running."""
        firing = self._firings[number]
        firing.observer.receive(firing, tensors)

    def clear(self) -> None:
        """The hooks are removed: graphs that refer to them give nothing any more."""
        self._firings.clear()
        self._calls.clear()
        _open.pop(int(self.token), None)


class _Observer:
    """One observer: what is traced of it, and what it does with the numbers.

    Without a schedule the numbers are computed inside the graph, where the compiler may fuse them with what computes
    the tensor. With one, the graph gives the tensor itself and they are computed outside, if the schedule holds: a step
    in which it does not hold then costs next to nothing. So are those of gradients that mixed precision has scaled.
    """

    def __init__(self, group: GraphObservers, site: HookSite) -> None:
        when = site.spec.keys.when
        is_scaled = site.hook_type.phase == "backward" and site.clock.scaler is not None
        has_schedule = when.step is not None or when.epoch is not None
        self.site = site
        self._token = group.token
        self._halves: Halves | None = None
        self._holds_in = {training: when.holds_in(training) for training in (True, False)}
        self._measured_inside = not (has_schedule or is_scaled)

        def number(*paths: str) -> int:
            require("torch, compiler")
            if torch.compiler.is_exporting():
                group.refuse_export(None)
            if self._halves is None:
                self._halves = site.spec.action.halves(site)
            _operator()
            return group.number(self, paths)

        def takes(dtype: torch.dtype, alone: bool) -> bool:
            with ordinary_tensors():
                return site.spec.action.takes_tensor(torch.empty(0, dtype=dtype), alone=alone)

        # called while tracing, not in the graph
        number._dynamo_marked_constant = takes._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self._number = number
        self._takes = takes

    # ---- traced --------------------------------------------------------------------------------------------------

    def see(self, value: Any) -> Any:
        """Look at the value of a forward hook."""
        site = self.site
        if not self._holds_in[site.clock.model.training]:
            return value
        seen = value if site.target_keys is None else containers.get(value, site.target_keys)
        if site.hook_type.in_tuple and site.target_keys is None:
            seen = containers.unwrapped(seen)
        paths: list[str] = []
        taken: list[Tensor] = []
        for path, leaf in containers.leaves(seen):
            if isinstance(leaf, Tensor) and self._takes(leaf.dtype, leaf is seen):
                paths.append(path)
                taken.append(leaf)
        number = self._number(*paths)
        torch.ops.hookrun.observed.default(self._token, [self._given(leaf) for leaf in taken], number)
        return value

    def watch(self, carrying: Sequence[tuple[str, Tensor]]) -> None:
        """Look at the gradients of these tensors, the outputs of one call."""
        number = self._number(*(path for path, _ in carrying))
        for place, (_, tensor) in enumerate(carrying):

            def fire(grad: Tensor, place: int = place) -> None:
                torch.ops.hookrun.observed.default(self._token, [self._given(grad)], number + place)

            tensor.register_hook(fire)

    def _given(self, x: Tensor) -> Tensor:
        """What the graph gives for a tensor: its numbers, or the tensor."""
        return self._measured(x.detach()) if self._measured_inside else x.detach()

    def _measured(self, x: Tensor) -> Tensor:
        part = self.site.part
        assert self._halves is not None
        return self._halves.measure(x if part is None else part.of(x))

    # ---- while the graph runs ------------------------------------------------------------------------------------

    def receive(self, firing: _Firing, tensors: Sequence[Tensor]) -> None:
        """Count a firing and report it, if the schedule holds."""
        site = self.site
        clock = site.clock
        when = site.spec.keys.when
        if not (when.holds_at(clock.step, clock.epoch) and when.holds_in(clock.model.training)):
            return
        if site.hook_type.phase == "forward" and repeating() is not None:
            return
        site.fired += 1
        site.idle += not tensors
        if site.sink.muted:
            return
        assert self._halves is not None
        with site.current.in_graph_at(firing.within, firing.call):
            for path, tensor in zip(firing.paths, tensors, strict=True):
                site.current.at = path
                if self._measured_inside:
                    numbers = tensor.clone()  # the graph uses its memory again
                else:
                    numbers = self._measured(self._unscaled(tensor))
                self._halves.report(numbers)

    def _unscaled(self, x: Tensor) -> Tensor:
        """A gradient without the factor of mixed precision's gradient scaler."""
        scaler = self.site.clock.scaler
        if self.site.hook_type.phase != "backward" or scaler is None or scaler._scale is None:
            return x
        return unscaled_leaf(scaler._scale, x)


def _receive(token: Tensor, tensors: list[Tensor], firing: int) -> None:
    observers = _open.get(int(token))
    if observers is not None:
        observers.receive(firing, tensors)


@cache
def _operator() -> torch.library.Library:
    """Define the operator, for the whole process."""
    library = torch.library.Library("hookrun", "DEF")
    library.define(_SCHEMA)
    library.impl("observed", _receive, "CompositeExplicitAutograd")
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    _register_effectful_op("hookrun::observed", _EffectType.ORDERED)
    torch.library.register_fake("hookrun::observed", lambda token, tensors, firing: None, lib=library)
    return library

"""Observers inside compiled graphs: an operator of hookrun's gives what they see to Python while the graph runs.

The compiler cannot look into the operator, so it breaks no graph. It has an effect: therefore the compiler neither
leaves it out nor repeats it, also in a backward pass and where activation checkpointing computes a part of the graph
again. What a hook does with the numbers, and whether its schedule holds, is Python's.

A call of the operator takes some microseconds. What the forward hooks of a graph of `Installation.compile` see is given
by one call at its end; what cannot wait for that (gradients, the inside of a checkpointed region, tensors that are
measured outside of the graph, a graph of `torch.compile`) by a call of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookrun.engine.actions.base import RECORD_KEYS, Halves
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import Op, function_of, unscaled_leaf
from hookrun.engine.runtime.checkpointing import repeating
from hookrun.engine.runtime.sinks import Sink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values import containers
from hookrun.engine.values.private_names import require
from hookrun.engine.values.tensors import ordinary_tensors

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

    token: [] int64 on the CPU, the number of this object; graphs do not have the number, so that they can be cached
    any:   there are observers that a graph can contain

    refuse_export: raises CompileError with what an exported program cannot contain
    """

    def __init__(self, sink: Sink, refuse_export: Op) -> None:
        number = next(_numbers)
        with ordinary_tensors():
            self.token = torch.tensor(number, device="cpu")
        self.any = False
        self.refuse_export = refuse_export
        self._sink = sink
        self._keeps_order = False  # what cannot wait would come before what waits
        self._firings: list[_Firing] = []
        self._calls = Counter[HookSite]()
        self._trace: object = None
        self._waiting: tuple[list[Tensor], list[int]] | None = None
        _open[number] = self

    def add(self, site: HookSite) -> Op:
        """What an observer does inside a graph, see `in_graph_of`."""
        self.any = True
        observer = _Observer(self, site)
        if site.hook_type.phase == "forward" and not observer.measures:
            self._keeps_order = True
        return observer.watch if site.hook_type is OUTPUT_GRAD else observer.see

    def clear(self) -> None:
        """The hooks are removed: graphs that refer to them give nothing any more."""
        self._firings.clear()
        self._calls.clear()
        _open.pop(int(self.token), None)

    # ---- traced --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A graph begins, at the end of which `end` is called."""
        self._waiting = ([], [])

    def give(self, tensors: list[Tensor], number: int, *, at_once: bool) -> None:
        """Give what a firing sees to Python. at_once: not at the end of the graph"""
        if at_once or self._keeps_order or self._waiting is None:
            torch.ops.hookrun.observed.default(self.token, tensors, [number])
        else:
            self._waiting[0].extend(tensors)
            self._waiting[1].append(number)

    def end(self) -> None:
        """Give to Python what waits for the end of the graph."""
        if self._waiting is not None and self._waiting[1]:
            torch.ops.hookrun.observed.default(self.token, self._waiting[0], self._waiting[1])
        self._waiting = None

    # ---- called while tracing ------------------------------------------------------------------------------------

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

    # ---- while a graph runs --------------------------------------------------------------------------------------

    def receive(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Let hooks act on what they see, one after the other."""
        batch: _Batch | None = None
        begin = 0
        for number in numbers:
            firing = self._firings[number]
            end = begin + len(firing.paths)
            if firing.observer.is_due():
                batch = batch or _Batch(self._sink)
                firing.observer.receive(firing, tensors[begin:end], batch)
            begin = end
        if batch is not None:
            batch.emit()


class _Batch:
    """Numbers of firings one after the other, which are read together later."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._numbers: list[Tensor] = []
        self._records: list[tuple[tuple[Any, ...], Callable[[list[float]], Mapping[str, Any]], int]] = []

    def add(
        self, start: tuple[Any, ...], read: Callable[[list[float]], Mapping[str, Any]], numbers: Tensor
    ) -> None:
        """Add a record. start: the values of RECORD_KEYS; read: see `Halves`"""
        if self._numbers and self._numbers[0].device != numbers.device:
            self.emit()
        self._numbers.append(numbers)
        self._records.append((start, read, numbers.numel()))

    def emit(self) -> None:
        """Give them to the sink, copied: the graph uses its memory again."""
        if self._numbers:
            self._sink.emit_numbers(torch.cat(self._numbers), partial(_records_of, self._records))
            self._numbers = []
            self._records = []


def _records_of(
    records: Sequence[tuple[tuple[Any, ...], Callable[[list[float]], Mapping[str, Any]], int]],
    numbers: list[float],
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    begin = 0
    for start, read, length in records:
        found.append({**dict(zip(RECORD_KEYS, start, strict=True)), **read(numbers[begin : begin + length])})
        begin += length
    return found


class _Observer:
    """One observer: what is traced of it, and what it does with the numbers.

    Without a schedule the numbers are computed inside the graph, where the compiler may fuse them with what computes
    the tensor. With one the graph gives the tensor itself, and the hook acts on it as outside of a graph: a step in
    which the schedule does not hold costs next to nothing. So it is for gradients that mixed precision has scaled.
    """

    def __init__(self, group: GraphObservers, site: HookSite) -> None:
        when = site.spec.keys.when
        is_scaled = site.hook_type.phase == "backward" and site.clock.scaler is not None
        has_schedule = when.step is not None or when.epoch is not None
        self.site = site
        self._group = group
        self.measures = not (has_schedule or is_scaled)
        self._halves: Halves | None = None
        self._function: Op | None = None
        self._holds_in = {training: when.holds_in(training) for training in (True, False)}
        self._asked_at = (-1, -1)
        self._holds = False

        def number(*paths: str) -> int:
            require("torch, compiler")
            if torch.compiler.is_exporting():
                group.refuse_export(None)
            if self._halves is None:
                self._halves = site.spec.action.halves(site)
                self._function = function_of(site)
            _operator()
            return group.number(self, paths)

        def takes(dtype: torch.dtype, alone: bool) -> bool:
            with ordinary_tensors():
                return site.spec.action.takes_tensor(torch.empty(0, dtype=dtype), alone=alone)

        self._number = _while_tracing(number)
        self._takes = _while_tracing(takes)

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
        at_once = not self.measures or _is_in_region()
        self._group.give([self._given(leaf) for leaf in taken], number, at_once=at_once)
        return value

    def watch(self, carrying: Sequence[tuple[str, Tensor]]) -> None:
        """Look at the gradients of these tensors, the outputs of one call."""
        number = self._number(*(path for path, _ in carrying))
        for place, (_, tensor) in enumerate(carrying):

            def fire(grad: Tensor, place: int = place) -> None:
                self._group.give([self._given(grad)], number + place, at_once=True)

            tensor.register_hook(fire)

    def _given(self, x: Tensor) -> Tensor:
        """What the graph gives for a tensor: its numbers, or the tensor."""
        x = x.detach()
        if not self.measures:
            return x
        assert self._halves is not None
        part = self.site.part
        return self._halves.measure(x if part is None else part.of(x))

    # ---- while the graph runs ------------------------------------------------------------------------------------

    def receive(self, firing: _Firing, tensors: Sequence[Tensor], batch: _Batch) -> None:
        """Count a firing and report it; the schedule holds."""
        site = self.site
        if site.hook_type.phase == "forward" and repeating() is not None:
            return
        site.fired += 1
        site.idle += not tensors
        if site.sink.muted:
            return
        current = site.current
        current.within = firing.within
        current.call_number = firing.call
        current.in_graph = True
        try:
            for path, tensor in zip(firing.paths, tensors, strict=True):
                current.at = path
                self._report(tensor, batch)
        finally:
            current.within = ""
            current.call_number = None
            current.in_graph = False

    def _report(self, tensor: Tensor, batch: _Batch) -> None:
        halves = self._halves
        function = self._function
        assert halves is not None and function is not None
        if self.measures and halves.read is not None:
            batch.add(self.site.record_start(), halves.read, tensor)
            return
        batch.emit()
        if self.measures:
            halves.report(tensor.clone())
        else:
            function(self._unscaled(tensor))

    def is_due(self) -> bool:
        """Whether the schedule holds now."""
        clock = self.site.clock
        when = self.site.spec.keys.when
        now = clock.step, clock.epoch
        if now != self._asked_at:
            self._asked_at = now
            self._holds = when.holds_at(*now)
        return self._holds and self._holds_in[clock.model.training]

    def _unscaled(self, x: Tensor) -> Tensor:
        """A gradient without the factor of mixed precision's gradient scaler."""
        scaler = self.site.clock.scaler
        if self.site.hook_type.phase != "backward" or scaler is None or scaler._scale is None:
            return x
        return unscaled_leaf(scaler._scale, x)


def _while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called while a graph is traced, not in the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_while_tracing
def _is_in_region() -> bool:
    """Whether a part of a graph is traced that has no access to the rest, as a checkpointed region is."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.current_tracer.parent is not None


def _receive(token: Tensor, tensors: list[Tensor], firings: list[int]) -> None:
    observers = _open.get(int(token))
    if observers is not None:
        observers.receive(tensors, firings)


@cache
def _operator() -> torch.library.Library:
    """Define the operator, for the whole process."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    library = torch.library.Library("hookrun", "DEF")
    library.define("observed(Tensor token, Tensor[] tensors, int[] firings) -> ()")
    library.impl("observed", _receive, "CompositeExplicitAutograd")
    torch.library.register_fake("hookrun::observed", lambda token, tensors, firings: None, lib=library)
    _register_effectful_op("hookrun::observed", _EffectType.ORDERED)
    return library

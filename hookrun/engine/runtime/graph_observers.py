"""Observers inside compiled graphs: an operator of hookrun's gives what they see to Python while the graph runs.

The compiler cannot look into the operator, so it breaks no graph. It has an effect: therefore the compiler neither
leaves it out nor repeats it, also in a backward pass and where activation checkpointing computes a part of the graph
again. What a hook does with the numbers, and whether its schedule holds, is Python's.

The first stage of the compiler notes each firing as one call of `fired`. In a graph of `Installation.compile` a pass
over these calls then saves what it can, see `graph_backend`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookrun.engine.actions.base import RECORD_KEYS, Halves, Reading
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.lanes import LaneNumbers, Lanes, TensorsOfLanes, lanes_of
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import Op, function_of, named, unscaled_leaf
from hookrun.engine.runtime.checkpointing import PASSED_ON, repeating
from hookrun.engine.runtime.clock import Clock
from hookrun.engine.runtime.compiled import refusal, while_tracing
from hookrun.engine.runtime.sinks import Sink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.spec.when import When
from hookrun.engine.values import containers
from hookrun.engine.values.forms import Form, form_of, unknown_class, value_of
from hookrun.engine.values.private_names import require
from hookrun.engine.values.tensors import ordinary_tensors
from hookrun.errors import Problem

MOST_UNREAD = 1 << 20
"""More numbers than this are read at once, so that a long loop does not hold them all."""

MOST_FORMS = 256
"""How many forms of what graphs give are remembered: a dimension of changing size makes many."""

_keys = count()
_open = WeakValueDictionary[int, "GraphObservers"]()

Columns = list[Tensor]
"""The numbers of a tensor that an observer sees, as tensors [n] float64."""


# ---- in a graph: functions that the first stage of the compiler does not look into ----------------------------------


def fired(observers: int, firing: int, token: Tensor, tensors: list[Tensor]) -> None:
    """Give a firing to Python: its numbers, or the tensors themselves where Python measures them.

    observers, firing: the numbers of the GraphObservers and of the firing
    token: of these observers
    """
    group = _open.get(observers)
    if group is None:  # the hooks were removed before the backward pass of a graph that Python runs
        return
    if group.observer(firing).measures:
        give(token, [firing], [measured(observers, firing, tensors)])
    else:
        torch.ops.hookrun.observed.default(token, [each.detach() for each in tensors], [firing], [])


def measured(observers: int, firing: int, tensors: list[Tensor]) -> list[Columns]:
    """The numbers of each tensor that a firing sees."""
    observer = _open[observers].observer(firing)
    return [observer.measure(each.detach()) for each in tensors]


def give(token: Tensor, firings: list[int], numbers: list[list[Columns]]) -> None:
    """Give the numbers of firings to Python, in one tensor on the device of the first ones.

    numbers: of each tensor of each firing
    """
    lengths: list[int] = []
    for of_firing in numbers:
        for of_tensor in of_firing:
            lengths.append(sum([column.shape[0] for column in of_tensor]))
    together = [joined(numbers)] if lengths else []
    torch.ops.hookrun.observed.default(token, together, firings, lengths)


def joined(numbers: list[list[Columns]]) -> Tensor:
    """[n] float64: the numbers of each tensor of each firing, on the device of the first ones."""
    columns: Columns = []
    for of_firing in numbers:
        for of_tensor in of_firing:
            columns.extend(of_tensor)
    return torch.cat([column.to(columns[0].device) for column in columns])


def in_lanes(observers: int, firing: int, tensors: list[Tensor]) -> LaneNumbers:
    """Statistics of the lanes of the only tensor that a firing sees."""
    observer = _open[observers].observer(firing)
    (tensor,) = tensors
    lanes = observer.lanes_of(tensor)
    assert lanes is not None
    return observer.in_lanes(tensor.detach(), lanes)


def finished(observers: int, firing: int, numbers: list[LaneNumbers], lengths: list[int]) -> list[Columns]:
    """The numbers of tensors that firings of one hook see. numbers: of `in_lanes`; lengths: elements of their lanes"""
    return [[_open[observers].observer(firing).of_lanes(numbers, lengths)]]


def _receive(token: Tensor, tensors: list[Tensor], firings: list[int], lengths: list[int]) -> None:
    observers = _open.get(int(token))
    if observers is None:
        return
    if not firings:
        observers.forward_begins()
    elif lengths:
        observers.receive_numbers(tensors[0], firings, lengths)
    else:
        observers.receive_tensors(tensors, firings)


@cache
def _operator() -> torch.library.Library:
    """Define the operator, for the whole process."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    from torch.fx.node import has_side_effect

    library = torch.library.Library("hookrun", "DEF")
    library.define("observed(Tensor token, Tensor[] tensors, int[] firings, SymInt[] lengths) -> ()")
    library.impl("observed", _receive, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "hookrun::observed", lambda token, tensors, firings, lengths: None, lib=library
    )
    _register_effectful_op("hookrun::observed", _EffectType.ORDERED)
    torch.compiler.allow_in_graph(fired)
    has_side_effect(fired)
    has_side_effect(give)
    return library


# ---- while a graph is traced, and while it runs ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Firing:
    """A firing of a hook in a graph, each time the graph runs.

    within: path of the tensor that the hook is attached to
    call:   the number of the module's call
    places: path of each tensor that it sees, below `within` -> the first values of RECORD_KEYS
    """

    observer: Observer
    within: str
    call: int
    places: Mapping[str, tuple[str, ...]]


Time = tuple[str, int, int]
"""Mode, epoch and step."""

_Seen = tuple["_Reported", Reading]
"""A firing among all that a graph gives in one call, and what makes its records."""


@dataclass(frozen=True, slots=True)
class _Reported:
    """A firing among all that a graph gives in one call.

    tensors: of each tensor that it sees, the first values of RECORD_KEYS and where its numbers begin and end
    """

    firing: _Firing
    tensors: Sequence[tuple[tuple[str, ...], int, int]]


@dataclass(frozen=True, slots=True)
class _Given:
    """What a graph gives in one call.

    sites: of the firings
    seen:  what makes their records, if it is the same each time, and none of them ever rests
    """

    firings: Sequence[_Reported]
    sites: Sequence[HookSite]
    seen: Sequence[_Seen]


Span = tuple[int, int]
"""Where the numbers of a tensor begin and end."""


def spans_of(lengths: Iterable[int]) -> list[Span]:
    """Those of numbers that follow each other."""
    bounds = [0, *accumulate(lengths)]
    return list(pairwise(bounds))


def _records_of(time: Time, seen: Sequence[_Seen], record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of firings of one moment. record: has the numbers of all"""
    numbers = record["numbers"].tolist()
    for given, read in seen:
        for about, begin, end in given.tensors:
            begins = dict(zip(RECORD_KEYS, (*about, *time, given.firing.call), strict=True))
            yield from read(begins, numbers[begin:end])


class Schedule:
    """Whether any of some schedules holds now, as to step and epoch; it is found out once for each."""

    def __init__(self, clock: Clock, schedules: Sequence[When]) -> None:
        self._clock = clock
        self._schedules = schedules
        self._asked_at = (-1, -1)
        self._holds = False

    def holds(self) -> bool:
        """Whether one of them holds at the present step and epoch."""
        now = self._clock._step, self._clock._epoch
        if now != self._asked_at:
            self._asked_at = now
            self._holds = any([when.holds_at(*now) for when in self._schedules])
        return self._holds


class GraphObservers:
    """The observers of one installation, in all of its graphs.

    token: [] int64 on the CPU, the number of this object; graphs do not have the number, so that they can be cached
    any:   there are observers that a graph can contain
    is_cleared: the hooks are removed
    forward_begins: called by a graph where a forward of the model begins, see `calling`

    refuse_export: raises CompileError with what an exported program cannot contain
    """

    def __init__(self, clock: Clock, sink: Sink, refuse_export: Op) -> None:
        self.key = next(_keys)
        with ordinary_tensors():
            self.token = torch.tensor(self.key, device="cpu")
        self.any = False
        self.clock = clock
        self.forward_begins: Callable[[], None] = lambda: None
        self.refuse_export = refuse_export
        self._sink = sink
        self._observers: list[Observer] = []
        self._firings: list[_Firing] = []
        self._given: dict[tuple[tuple[int, ...], tuple[int, ...]], _Given] = {}
        self._calls = Counter[HookSite]()
        self._unread = 0
        self._trace: object = None
        self.is_cleared = False
        _open[self.key] = self

    def add(self, site: HookSite) -> Op:
        """What an observer does inside a graph, see `in_graph_of`."""
        self.any = True
        observer = self._observer(site)
        return observer.watch if site.hook_type is OUTPUT_GRAD else observer.see

    def counting(self, site: HookSite) -> Callable[[Sequence[str]], Callable[[int], None]]:
        """What counts an edit of gradients inside a graph, see `in_graph_of`."""
        return self._observer(site).counting

    def calling(self, forward_begins: Callable[[], None]) -> Callable[[], None]:
        """What lets a graph call a function each time it runs, where the model's forward begins."""
        self.forward_begins = forward_begins

        @while_tracing
        def define() -> None:
            require("torch, compiler")
            _operator()

        def begin() -> None:
            define()
            torch.ops.hookrun.observed.default(self.token, [], [], [])

        return begin

    def _observer(self, site: HookSite) -> Observer:
        observer = _Capture(self, site) if site.spec.action.captures else Observer(self, site)
        self._observers.append(observer)
        return observer

    def observer(self, firing: int) -> Observer:
        """The observer that fires, by the number of the firing."""
        return self._firings[firing].observer

    def clear(self) -> None:
        """The hooks are removed: graphs that refer to them give nothing any more."""
        self.is_cleared = True
        for observer in self._observers:
            vars(observer).clear()  # its functions refer to it
        self._observers.clear()
        self._firings.clear()
        self._given.clear()
        self._calls.clear()
        _open.pop(self.key, None)

    def number(self, observer: Observer, paths: tuple[str, ...]) -> int:
        """A number for a firing in the graph that is traced now; for gradients the first of one for each path."""
        from torch._guards import TracingContext

        trace = TracingContext.try_get()
        if trace is not self._trace:
            self._trace = trace
            self._calls.clear()
        site = observer.site
        call = self._calls[site] if site.calls is not None or site.counts_calls else 0
        self._calls[site] += 1
        action = site.spec.action.action_name
        first = len(self._firings)
        about = {path: (site.hook_name, site.path, path, action) for path in paths}
        if site.hook_type is OUTPUT_GRAD:
            self._firings += [_Firing(observer, path, call, {"": about[path]}) for path in paths]
        else:
            self._firings.append(_Firing(observer, "", call, about))
        return first

    # ---- while a graph runs --------------------------------------------------------------------------------------

    def receive_tensors(self, tensors: Sequence[Tensor], firings: Sequence[int]) -> None:
        """Let hooks act on tensors."""
        for number in firings:
            firing = self._firings[number]
            if firing.observer.fires(firing):
                firing.observer.receive(number, firing, tensors)

    def receive_numbers(self, numbers: Tensor, firings: Sequence[int], lengths: Sequence[int]) -> None:
        """Let hooks report numbers, or record them later. lengths: how many there are of each tensor, in order"""
        key = tuple(firings), tuple(lengths)
        given = self._given.get(key)
        if given is None:
            if len(self._given) == MOST_FORMS:
                self._given.clear()
            given = self._given[key] = self._given_by(firings, spans_of(lengths))
        self._report(given, numbers.clone())  # the graph uses its memory again

    def receiving(self, firings: Sequence[int], spans: Sequence[Span]) -> Callable[[Tensor], None]:
        """As `receive_numbers`, for the last output of a graph. spans: of each tensor, in the order of the firings"""
        given = self._given_by(firings, spans)

        def receive(numbers: Tensor) -> None:
            if not self.is_cleared:
                # of a CUDA graph, which torch's settings may choose, the next call would write them again
                self._report(given, numbers if numbers.is_cpu else numbers.clone())

        return receive

    def _given_by(self, firings: Sequence[int], spans: Iterable[Span]) -> _Given:
        reported: list[_Reported] = []
        seen: list[_Seen] = []
        following = iter(spans)
        for number in firings:
            firing = self._firings[number]
            tensors = [(about, *next(following)) for about in firing.places.values()]
            reported.append(_Reported(firing, tensors))
            records = firing.observer.records
            if records is not None and tensors and not firing.observer.may_rest:
                seen.append((reported[-1], records))
        sites = [each.firing.observer.site for each in reported]
        return _Given(reported, sites, seen if len(seen) == len(reported) else ())

    def _report(self, given: _Given, numbers: Tensor) -> None:
        """Count firings, and let hooks report the numbers or record them later."""
        if repeating() is not None and given.firings[0].firing.observer.is_forward:
            return
        muted = self._sink.muted
        policy = ""
        if given.seen and not muted:
            seen = given.seen
            for site in given.sites:
                site.fired += 1
        else:
            seen, policy = self._seen(given, numbers, muted=muted)
        if not seen:
            return
        clock = self.clock
        time = clock.mode, clock._epoch, clock._step
        self._sink.emit_together(numbers, policy, partial(_records_of, time, seen))
        self._unread += numbers.numel()
        if self._unread > MOST_UNREAD:
            self._unread = 0
            self._sink.settle()

    def _seen(self, given: _Given, numbers: Tensor, *, muted: bool) -> tuple[list[_Seen], str]:
        """Count the firings that do not rest; those that record their numbers later, and the strictest policy."""
        training = self.clock.model.training
        seen: list[_Seen] = []
        policy = ""
        for each in given.firings:
            firing = each.firing
            observer = firing.observer
            if observer.may_rest and not observer.is_due(training):
                continue
            observer.site.fired += 1
            if not each.tensors:
                observer.site.idle += 1
                continue
            if muted:
                continue
            reading = observer.reading
            if reading is not None:
                seen.append((each, reading))
                policy = observer.policy or policy
                continue
            for path, (_, begin, end) in zip(firing.places, each.tensors, strict=True):
                observer.report(firing, path, numbers[begin:end])
        return seen, policy


class Observer:
    """One observer: what is traced of it, and what it does with what a graph gives.

    Its numbers are computed inside the graph, where the compiler may fuse them with what computes the tensor. `fired`
    gives the tensor itself if there is a schedule, and the hook acts on it as outside of a graph: a step in which the
    schedule does not hold costs next to nothing. So it is for gradients that mixed precision has scaled. In a graph of
    `Installation.compile` the numbers of forward observers are computed there with a schedule too, since a step in
    which none of them is due runs another graph.

    measures: its numbers are computed inside the graph
    can_wait: they can leave the graph later than they are computed; then they are computed there even with a schedule
    when:     its schedule by step and epoch; None: it has none
    may_rest: there are steps or modes in which it does nothing
    """

    def __init__(self, group: GraphObservers, site: HookSite) -> None:
        when = site.spec.keys.when
        self.is_forward = site.hook_type.phase == "forward"
        self._is_edit = not site.spec.action.observes
        self.site = site
        self.when = when if when.step is not None or when.epoch is not None else None
        self.measures = self.when is None and (self.is_forward or site.clock.scaler is None)
        self.can_wait = self.is_forward
        self._group = group
        self._name = (
            f"{site.hook_name} {site.path}"  # read so that no graph is taken for that of another observer
        )
        self._halves: Halves | None = None
        self._function: Op | None = None
        self.policy = "error" if site.spec.action.value_of(Meaning.POLICY) == "error" else ""
        self._holds_in = {training: when.holds_in(training) for training in (True, False)}
        self._schedule = Schedule(site.clock, [when])
        self.may_rest = self.when is not None or not all(self._holds_in.values())

        def number(name: str, *paths: str) -> int:
            """The number of a firing."""
            require("torch, compiler")
            if torch.compiler.is_exporting():
                group.refuse_export(None)
            if self._function is None and not self._is_edit:
                self._halves = site.spec.action.halves(site)
                self._function = function_of(site)
            _operator()
            return group.number(self, paths)

        def takes(dtype: torch.dtype, alone: bool) -> bool:
            with ordinary_tensors():
                return site.spec.action.takes_tensor(torch.empty(0, dtype=dtype), alone=alone)

        self._number = while_tracing(number)
        self._takes = while_tracing(takes)

    # ---- traced --------------------------------------------------------------------------------------------------

    def see(self, value: Any) -> Any:
        """Look at the value of a forward hook."""
        if not self._holds_in[self.site.clock.model.training]:
            return value
        seen = self._target(value)
        paths: list[str] = []
        taken: list[Tensor] = []
        for path, leaf in containers.leaves(seen):
            if isinstance(leaf, Tensor) and self._takes(leaf.dtype, leaf is seen):
                paths.append(path)
                taken.append(leaf)
        self._fire(self._number(self._name, *paths), taken)
        return value

    def _target(self, value: Any) -> Any:
        site = self.site
        if site.target_keys is not None:
            return containers.get(value, site.target_keys)
        return containers.unwrapped(value) if site.hook_type.in_tuple else value

    def counting(self, paths: Sequence[str]) -> Callable[[int], None]:
        """What counts the firing for the gradient of one of these tensors."""
        number = self._number(self._name, *paths)

        def count(place: int) -> None:
            self._fire(number + place, [])

        return count

    def watch(self, carrying: Sequence[tuple[str, Tensor]]) -> None:
        """Look at the gradients of these tensors, the outputs of one call."""
        number = self._number(self._name, *(path for path, _ in carrying))
        for place, (_, tensor) in enumerate(carrying):

            def fire(grad: Tensor, place: int = place) -> None:
                self._fire(number + place, [grad])

            tensor.register_hook(fire)

    def _fire(self, number: int, tensors: list[Tensor]) -> None:
        fired(self._group.key, number, self._group.token, tensors)

    # ---- traced by the compiler's second stage, where no guard comes from what is read -----------------------------

    def measure(self, x: Tensor) -> Columns:
        """The numbers of a tensor."""
        assert self._halves is not None
        lanes = self.lanes_of(x)
        if lanes is not None:
            return [self.of_lanes([self.in_lanes(x, lanes)], [lanes.length])]
        part = self.site.part
        return self._halves.measure(x if part is None else part.of(x))

    def lanes_of(self, x: Tensor) -> Lanes | None:
        """The lanes by which a tensor is measured; None: it is measured as a whole."""
        assert self._halves is not None
        if not self._halves.needs or self.site.part is not None:
            return None
        return lanes_of(x, self._halves.needs)

    def count_of(self, x: Tensor) -> int | None:
        """How many numbers there are of a tensor; None: only the graph knows."""
        if self._halves is None or self.site.part is not None:
            return None
        is_empty = isinstance(x.numel(), int) and not x.numel()
        return None if is_empty else self._halves.count(x.shape)

    def in_lanes(self, x: Tensor, lanes: Lanes) -> LaneNumbers:
        """Statistics of the lanes of a tensor."""
        assert self._halves is not None
        return lanes.numbers(x, self._halves.needs)

    def of_lanes(self, numbers: Sequence[LaneNumbers], lengths: Sequence[int]) -> Tensor:
        """The numbers of tensors, one tensor after the other: [n] float64."""
        assert self._halves is not None and self._halves.finish is not None
        columns = self._halves.finish(TensorsOfLanes(numbers, lengths))
        return torch.stack([column.double() for column in columns], -1).flatten()

    # ---- while the graph runs ------------------------------------------------------------------------------------

    @property
    def records(self) -> Reading | None:
        """What makes records of its numbers, if it is the same each time."""
        return None if self._halves is None else self._halves.records

    @property
    def reading(self) -> Reading | None:
        """What makes records of its numbers of this firing; None: it reports them when the graph has run."""
        halves = self._halves
        if halves is None or halves.reading is None:
            return self.records
        return halves.reading()

    def is_due(self, training: bool) -> bool:
        """Whether its schedule holds now."""
        return self._schedule.holds() and self._holds_in[training]

    def fires(self, firing: _Firing) -> bool:
        """Count a firing, if the schedule holds; whether there is something to report."""
        site = self.site
        if not self.is_due(site.clock.model.training):
            return False
        if self.is_forward and repeating() is not None:
            return False
        site.fired += 1
        if self._is_edit:
            return False
        site.idle += not firing.places
        return not site.sink.muted

    def receive(self, number: int, firing: _Firing, tensors: Sequence[Tensor]) -> None:
        """Let the hook act on the tensors that a firing sees."""
        assert self._function is not None
        for path, tensor in zip(firing.places, tensors, strict=True):
            self._act(firing, path, self._function, self._unscaled(tensor))

    def report(self, firing: _Firing, path: str, numbers: Tensor) -> None:
        """Report the numbers of a tensor."""
        assert self._halves is not None and self._halves.report is not None
        self._act(firing, path, self._halves.report, numbers)

    def _act(self, firing: _Firing, path: str, function: Op, value: Any) -> None:
        current = self.site.current
        current.at = path
        current.within = firing.within
        current.call_number = firing.call
        current.in_graph = True
        try:
            function(value)
        finally:
            current.within = ""
            current.call_number = None
            current.in_graph = False

    def _unscaled(self, x: Tensor) -> Tensor:
        """A gradient without the factor of mixed precision's gradient scaler."""
        scaler = self.site.clock.scaler
        if self.is_forward or scaler is None or scaler._scale is None:
            return x
        return unscaled_leaf(scaler._scale, x)


class _Capture(Observer):
    """A capture: the graph gives the tensors of a value, and outside of it the value is put together again."""

    def __init__(self, group: GraphObservers, site: HookSite) -> None:
        super().__init__(group, site)
        self.measures = False
        self.can_wait = False
        forms: dict[int, Form] = {}

        def formed(name: str, form: Form) -> int:
            require("torch, compiler")
            unknown = unknown_class(form)
            if unknown is not None:
                what = (
                    f"capture sees an object of class {unknown.__name__}, which a graph cannot give to Python"
                )
                refusal([Problem(site.spec.where, what, "name a tensor with `target`")])(None)
            number: int = self._number(name, "")
            forms[number] = form
            return number

        self._forms = forms
        self._formed = while_tracing(formed)

    def see(self, value: Any) -> Any:
        """Give the tensors of the value of a forward hook to Python."""
        if self._holds_in[self.site.clock.model.training]:
            tensors: list[Tensor] = []
            number = self._formed(self._name, form_of(self._target(value), tensors))
            self._fire(number, tensors)
        return value

    def receive(self, number: int, firing: _Firing, tensors: Sequence[Tensor]) -> None:
        """Let the hook keep the value, in memory of its own: the graph uses its memory again."""
        site = self.site
        assert self._function is not None
        value = value_of(self._forms[number], iter([tensor.clone() for tensor in tensors]))
        if value is None:
            site.target_was_none |= site.target_keys is not None
            site.found_nothing()
        try:
            self._act(firing, "", self._function, value)
        except PASSED_ON:
            raise
        except Exception as error:
            raise named(site, error, value) from error

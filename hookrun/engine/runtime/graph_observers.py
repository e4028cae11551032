"""Observers inside compiled graphs: an operator of hookrun's gives what they see to Python while the graph runs.

The compiler cannot look into the operator, so it breaks no graph. It has an effect: therefore the compiler neither
leaves it out nor repeats it, also in a backward pass and where activation checkpointing computes a part of the graph
again. What a hook does with the numbers, and whether its schedule holds, is Python's.

A call of the operator takes some microseconds. What the forward hooks of a graph of `Installation.compile` see is given
by one call at its end; what cannot wait for that (gradients, the inside of a checkpointed region, tensors that are
measured outside of the graph, a graph of `torch.compile`) by a call of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookrun.engine.actions.base import RECORD_KEYS, Halves, Reading
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.runtime.apply_action import Op, function_of, named, unscaled_leaf
from hookrun.engine.runtime.checkpointing import PASSED_ON, repeating
from hookrun.engine.runtime.compiled import refusal, while_tracing
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.values import containers
from hookrun.engine.values.forms import Form, form_of, unknown_class, value_of
from hookrun.engine.values.private_names import require
from hookrun.engine.values.tensors import ordinary_tensors
from hookrun.errors import Problem

MOST_LAYOUTS = 256
"""Of how many graphs and shapes it is remembered which numbers belong to which firing."""

MOST_UNREAD = 1 << 20
"""More numbers than this are read at once, so that a long loop does not hold them all."""

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


class _Part(NamedTuple):
    """The numbers of one tensor among all that a graph gives.

    about:      the first values of RECORD_KEYS, which are the same each time
    call:       the last one
    begin, end: which of all numbers they are
    """

    path: str
    about: tuple[str, str, str, str]
    call: int
    begin: int
    end: int


Time = tuple[str, int, int]
"""Mode, epoch and step."""


def _records_of(
    time: Time, parts: Sequence[_Part], reads: Sequence[Reading], record: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The records of firings of one moment. record: has the numbers of all"""
    numbers = record["numbers"].tolist()
    for part, read in zip(parts, reads, strict=True):
        begins = dict(zip(RECORD_KEYS, (*part.about, *time, part.call), strict=True))
        yield from read(begins, numbers[part.begin : part.end])


class GraphObservers:
    """The observers of one installation, in all of its graphs.

    token: [] int64 on the CPU, the number of this object; graphs do not have the number, so that they can be cached
    any:   there are observers that a graph can contain

    refuse_export: raises CompileError with what an exported program cannot contain
    """

    def __init__(self, refuse_export: Op) -> None:
        self.key = next(_numbers)
        with ordinary_tensors():
            self.token = torch.tensor(self.key, device="cpu")
        self.any = False
        self.refuse_export = refuse_export
        self._observers: list[_Observer] = []
        self._firings: list[_Firing] = []
        self._layouts = dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[_Firing, list[_Part]]]]()
        self._calls = Counter[HookSite]()
        self._unread = 0
        self._trace: object = None
        self._waiting: list[tuple[list[Tensor], list[int], int]] | None = None
        self._given = _counted_while_tracing()
        _open[self.key] = self

    def add(self, site: HookSite) -> Op:
        """What an observer does inside a graph, see `in_graph_of`."""
        self.any = True
        observer = self._observer(site)
        return observer.watch if site.hook_type is OUTPUT_GRAD else observer.see

    def counting(self, site: HookSite) -> Callable[[Sequence[str]], Callable[[int], None]]:
        """What counts an edit of gradients inside a graph, see `in_graph_of`."""
        return self._observer(site).counting

    def _observer(self, site: HookSite) -> _Observer:
        observer = _Capture(self, site) if site.spec.action.captures else _Observer(self, site)
        self._observers.append(observer)
        return observer

    def clear(self) -> None:
        """The hooks are removed: graphs that refer to them give nothing any more."""
        for observer in self._observers:
            vars(observer).clear()  # its functions refer to it
        self._observers.clear()
        self._firings.clear()
        self._layouts.clear()
        self._calls.clear()
        _open.pop(self.key, None)

    # ---- traced --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A graph begins, at the end of which `end` is called."""
        self._waiting = []
        self._given(0)

    def wait(self, numbers: list[Tensor], lengths: list[int], firing: int) -> None:
        """Give the numbers of a firing to Python at the end of the graph."""
        if self._waiting is None:
            self.give_numbers(numbers, lengths, [firing])
        else:
            self._waiting.append((numbers, lengths, firing))

    def end(self) -> None:
        """Give to Python what waits for the end of the graph."""
        self.give_waiting()
        assert self._waiting is not None
        self._waiting.clear()  # what is in it when the trace ends would be an output of the graph
        self._waiting = None

    def give_waiting(self) -> None:
        """Give to Python what waits; also inside a checkpointed region, which can read what is outside of it."""
        if self._waiting is None:
            return
        numbers: list[Tensor] = []
        lengths: list[int] = []
        firings: list[int] = []
        for of_firing in self._waiting[self._given(len(self._waiting)) :]:
            numbers.extend(of_firing[0])
            lengths.extend(of_firing[1])
            firings.append(of_firing[2])
        if firings:
            self.give_numbers(numbers, lengths, firings)

    def give_numbers(self, numbers: list[Tensor], lengths: list[int], firings: list[int]) -> None:
        """Give the numbers of firings to Python, all on the device of the first ones. lengths: of each tensor seen"""
        here = [each.to(numbers[0].device) for each in numbers]
        torch.ops.hookrun.observed.default(self.token, here, [*firings], [*lengths])

    def give_tensors(self, tensors: list[Tensor], firing: int) -> None:
        """Give the tensors that a firing sees to Python."""
        torch.ops.hookrun.observed.default(self.token, tensors, [firing], [])

    # ---- called while tracing ------------------------------------------------------------------------------------

    def number(self, observer: _Observer, paths: tuple[str, ...]) -> int:
        """A number for a firing in the graph that is traced now; for gradients the first of one for each path."""
        from torch._guards import TracingContext

        trace = TracingContext.try_get()
        if trace is not self._trace:
            self._trace = trace
            self._calls.clear()
        site = observer.site
        call = self._calls[site] if site.calls is not None or site.counts_calls else 0
        self._calls[site] += 1
        first = len(self._firings)
        if site.hook_type is OUTPUT_GRAD:
            self._firings += [_Firing(observer, path, ("",), call) for path in paths]
        else:
            self._firings.append(_Firing(observer, "", paths, call))
        return first

    # ---- while a graph runs --------------------------------------------------------------------------------------

    def measured(self, firing: int, x: Tensor) -> list[Tensor]:
        """The numbers of a tensor that a firing sees."""
        return self._firings[firing].observer.measure(x)

    def receive(self, tensors: Sequence[Tensor], firings: Sequence[int], lengths: Sequence[int]) -> None:
        """Let hooks act on what they see. lengths: how many numbers there are of each tensor that is measured"""
        if not lengths:
            for number in firings:
                firing = self._firings[number]
                if isinstance(firing.observer, _Capture):
                    firing.observer.keep(number, firing, tensors)
                elif firing.observer.fires(firing):
                    for path, tensor in zip(firing.paths, tensors, strict=True):
                        firing.observer.act(firing, path, tensor)
            return
        numbers = torch.cat([*tensors])  # copied: the graph uses its memory again
        parts: list[_Part] = []
        reads: list[Reading] = []  # few new objects for each firing: the garbage collector counts them
        policy = ""
        for firing, of_firing in self._parts(tuple(firings), tuple(lengths)):
            observer = firing.observer
            if not observer.fires(firing):
                continue
            reading = observer.reading
            for part in of_firing:
                if reading is None:
                    observer.act(firing, part.path, numbers[part.begin : part.end])
                else:
                    parts.append(part)
                    reads.append(reading())
                    policy = observer.policy or policy
        if parts:
            clock = self._observers[0].site.clock
            time = clock.mode, clock.epoch, clock.step
            judge = partial(_records_of, time, parts, reads)
            start = (*parts[0].about, *time, parts[0].call)
            data = {"numbers": numbers, "judge": judge, "policy": policy}
            sink = self._observers[0].site.sink
            sink.emit(start, data)
            self._unread += len(numbers)
            if self._unread > MOST_UNREAD:
                self._unread = 0
                sink.settle()

    def _parts(
        self, firings: tuple[int, ...], lengths: tuple[int, ...]
    ) -> Sequence[tuple[_Firing, Sequence[_Part]]]:
        """Which numbers belong to each firing: the same at each run of a graph with the same shapes."""
        if (firings, lengths) not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            ends = accumulate(lengths)
            begin = 0
            layout: list[tuple[_Firing, list[_Part]]] = []
            for number in firings:
                firing = self._firings[number]
                site = firing.observer.site
                parts: list[_Part] = []
                for path in firing.paths:
                    at = firing.within + path
                    about = site.hook_name, site.path, at, site.spec.action.action_name
                    end = next(ends)
                    parts.append(_Part(path, about, firing.call, begin, end))
                    begin = end
                layout.append((firing, parts))
            self._layouts[firings, lengths] = layout
        return self._layouts[firings, lengths]


class _Observer:
    """One observer: what is traced of it, and what it does with the numbers.

    Without a schedule the numbers are computed inside the graph, where the compiler may fuse them with what computes
    the tensor. With one the graph gives the tensor itself, and the hook acts on it as outside of a graph: a step in
    which the schedule does not hold costs next to nothing. So it is for gradients that mixed precision has scaled.
    """

    def __init__(self, group: GraphObservers, site: HookSite) -> None:
        when = site.spec.keys.when
        self._is_edit = not site.spec.action.observes
        is_scaled = site.hook_type.phase == "backward" and site.clock.scaler is not None
        has_schedule = when.step is not None or when.epoch is not None
        self.site = site
        self._group = group
        self._name = (
            f"{site.hook_name} {site.path}"  # read so that no graph is taken for that of another observer
        )
        self.measures = not (has_schedule or is_scaled)
        self._halves: Halves | None = None
        self._function: Op | None = None
        self.policy = "error" if site.spec.action.value_of(Meaning.POLICY) == "error" else ""
        self._holds_in = {training: when.holds_in(training) for training in (True, False)}
        self._asked_at = (-1, -1)
        self._holds = False

        def number(name: str, *paths: str) -> tuple[int, int]:
            """The number of a firing, and how many tensors of numbers there are of each tensor that it sees."""
            require("torch, compiler")
            if torch.compiler.is_exporting():
                group.refuse_export(None)
            if self._halves is None and not self._is_edit:
                self._halves = site.spec.action.halves(site)
                self._function = function_of(site)
            _operator()
            return group.number(self, paths), 0 if self._halves is None else self._halves.count

        def takes(dtype: torch.dtype, alone: bool) -> bool:
            with ordinary_tensors():
                return site.spec.action.takes_tensor(torch.empty(0, dtype=dtype), alone=alone)

        self._number = while_tracing(number)
        self._takes = while_tracing(takes)

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
        number, count = self._number(self._name, *paths)
        if not self.measures:
            self._group.give_waiting()
            self._group.give_tensors([leaf.detach() for leaf in taken], number)
            return value
        numbers: list[Tensor] = []
        lengths: list[int] = []
        for leaf in taken:
            columns = _measured(self._group.key, number, count, leaf.detach())
            numbers.extend(columns)
            lengths.append(sum([len(column) for column in columns]))
        if _is_in_region():
            self._group.give_waiting()
            self._group.give_numbers(numbers, lengths, [number])
        else:
            self._group.wait(numbers, lengths, number)
        return value

    def counting(self, paths: Sequence[str]) -> Callable[[int], None]:
        """What counts the firing for the gradient of one of these tensors."""
        number, _ = self._number(self._name, *paths)

        def count(place: int) -> None:
            self._group.give_tensors([], number + place)

        return count

    def watch(self, carrying: Sequence[tuple[str, Tensor]]) -> None:
        """Look at the gradients of these tensors, the outputs of one call."""
        number, count = self._number(self._name, *(path for path, _ in carrying))
        for place, (_, tensor) in enumerate(carrying):

            def fire(grad: Tensor, place: int = place) -> None:
                if not self.measures:
                    self._group.give_tensors([grad.detach()], number + place)
                    return
                columns = _measured(self._group.key, number + place, count, grad.detach())
                self._group.give_numbers(columns, [sum([len(each) for each in columns])], [number + place])

            tensor.register_hook(fire)

    # ---- traced by the compiler's second stage, where no guard comes from what is read -----------------------------

    def measure(self, x: Tensor) -> list[Tensor]:
        """The numbers of a tensor, as tensors [n] float64."""
        assert self._halves is not None
        part = self.site.part
        return self._halves.measure(x if part is None else part.of(x))

    # ---- while the graph runs ------------------------------------------------------------------------------------

    @property
    def reading(self) -> Callable[[], Reading] | None:
        """What reads its numbers later; None: it acts on them when the graph has run."""
        return None if self._halves is None else self._halves.reading

    def fires(self, firing: _Firing) -> bool:
        """Count a firing, if the schedule holds; whether there is something to report."""
        site = self.site
        if not self._is_due() or (site.hook_type.phase == "forward" and repeating() is not None):
            return False
        site.fired += 1
        if self._is_edit:
            return False
        site.idle += not firing.paths
        return not site.sink.muted

    def act(self, firing: _Firing, path: str, given: Tensor) -> None:
        """Report the numbers of a tensor, or let the hook act on the tensor."""
        report = None if self._halves is None else self._halves.report
        function = self._function
        current = self.site.current
        current.at = path
        current.within = firing.within
        current.call_number = firing.call
        current.in_graph = True
        try:
            if self.measures:
                assert report is not None
                report(given)
            else:
                assert function is not None
                function(self._unscaled(given))
        finally:
            current.within = ""
            current.call_number = None
            current.in_graph = False

    def _is_due(self) -> bool:
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


class _Capture(_Observer):
    """A capture: the graph gives the tensors of a value, and outside of it the value is put together again."""

    def __init__(self, group: GraphObservers, site: HookSite) -> None:
        super().__init__(group, site)
        self.measures = False
        forms: dict[int, Form] = {}

        def number(name: str, form: Form) -> int:
            require("torch, compiler")
            unknown = unknown_class(form)
            if torch.compiler.is_exporting():
                group.refuse_export(None)
            if unknown is not None:
                what = (
                    f"capture sees an object of class {unknown.__name__}, which a graph cannot give to Python"
                )
                refusal([Problem(site.spec.where, what, "name a tensor with `target`")])(None)
            if self._function is None:
                self._function = function_of(site)
            _operator()
            numbered = group.number(self, ("",))
            forms[numbered] = form
            return numbered

        self._forms = forms
        self._formed = while_tracing(number)

    def see(self, value: Any) -> Any:
        """Give the tensors of the value of a forward hook to Python."""
        site = self.site
        if self._holds_in[site.clock.model.training]:
            seen = value if site.target_keys is None else containers.get(value, site.target_keys)
            if site.hook_type.in_tuple and site.target_keys is None:
                seen = containers.unwrapped(seen)
            tensors: list[Tensor] = []
            number = self._formed(self._name, form_of(seen, tensors))
            self._group.give_tensors(tensors, number)
        return value

    def keep(self, number: int, firing: _Firing, tensors: Sequence[Tensor]) -> None:
        """Let the hook keep the value, in memory of its own: the graph uses its memory again."""
        if not self.fires(firing):
            return
        site = self.site
        value = value_of(self._forms[number], iter([tensor.clone() for tensor in tensors]))
        if value is None:
            site.target_was_none |= site.target_keys is not None
            site.found_nothing()
        try:
            self.act(firing, "", value)
        except PASSED_ON:
            raise
        except Exception as error:
            raise named(site, error, value) from error


def _counted_while_tracing() -> Callable[[int], int]:
    """A function that notes a number and returns the one before.

    A trace cannot do so: in a region it may not write what is outside, and what it writes after it has registered a
    hook on a tensor is not what it reads.
    """
    before = [0]

    @while_tracing
    def note(number: int) -> int:
        before.append(number)
        return before.pop(0)

    return note


@while_tracing
def _is_in_region() -> bool:
    """Whether a part of a graph is traced that has no access to the rest, as a checkpointed region is."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.current_tracer.parent is not None


_OF_OBSERVER = re.compile(r"\.__self__\.firings(\[\d+\](\.traced(\.__func__|\.__self__.*)?)?)?$")
"""The end of the name of what is read of an observer, from the hook that torch calls. A removed hook is another one."""


def with_few_guards(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of torch.compile, or those of its mode, and that what observers read is not compared at each call.

    It cannot change while they are installed; each comparison would cost as much as a part of a small layer.
    """
    from torch._inductor import list_mode_options

    wanted = dict(options or list_mode_options(mode or "default"))
    wanted.setdefault("guard_filter_fn", lambda guards: [_is_needed(guard) for guard in guards])
    return wanted


def _is_needed(guard: Any) -> bool:
    """Whether a guard is about anything but what observers read; the mode of the model and tensors are not theirs.

    Only in the frame of `Installation.compile`: another one may be called for several observers.
    """
    if guard.guard_type == "TENSOR_MATCH" or guard.name.endswith(".training"):
        return True
    if guard.name.startswith(("G['__import_hookrun", "hookrun_observers")):
        return False
    return not (guard.name.startswith("hooked_model") and _OF_OBSERVER.search(guard.name))


def _measured(observers: int, firing: int, count: int, x: Tensor) -> list[Tensor]:
    group = _open.get(observers)
    if group is None:  # the hooks were removed before the backward pass of a graph that Python runs
        return [x.new_empty(0, dtype=torch.float64)] * count
    return group.measured(firing, x)


def _receive(token: Tensor, tensors: list[Tensor], firings: list[int], lengths: list[int]) -> None:
    observers = _open.get(int(token))
    if observers is not None:
        observers.receive(tensors, firings, lengths)


@cache
def _operator() -> torch.library.Library:
    """Define the operator, for the whole process."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    library = torch.library.Library("hookrun", "DEF")
    library.define("observed(Tensor token, Tensor[] tensors, int[] firings, SymInt[] lengths) -> ()")
    library.impl("observed", _receive, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "hookrun::observed", lambda token, tensors, firings, lengths: None, lib=library
    )
    torch.compiler.allow_in_graph(_measured)
    _register_effectful_op("hookrun::observed", _EffectType.ORDERED)
    return library

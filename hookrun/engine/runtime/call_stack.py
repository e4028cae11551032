"""Which call is this? The open calls of each thread, the forwards that they make up, and their numbers.

What a hook keeps from the beginning of a call to its end is in `OpenCall.kept`, for all hooks of all installations. A
call is told by the frame in which torch runs it, since a count of hooks would go wrong: torch runs no hook after
KeyboardInterrupt and SystemExit, which would have ended the call, and after an exception in one pre-hook it runs the
`always_call` hooks of others that have not begun the call.

A forward begins with the outermost call of any module of the model when none is open in this thread, and ends with that
call. A call of the root is one case; `model.encode(x)`, each encoder of a pair, and the network that a `training_step`
calls are others.

Not every module is watched: those that need it (their calls are numbered, a hook takes what another one has seen, they
take tokens), and the modules around them. This is the same: a call of any other module has none of these inside it, so
whatever it begins ends before one of their hooks fires. The exception is a module that calls one which is not below it,
such as a member of a plain list: its call is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import local
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hookrun.engine.plan.model_tree import PointsAt, children_first
from hookrun.engine.runtime.checkpointing import Call, Log, regions, repeating
from hookrun.engine.runtime.frames import call_frame, finished

if TYPE_CHECKING:
    from hookrun.engine.runtime.tokens.calls import Pass

CallFunction = Callable[[nn.Module, Any, Any], object]
"""A function of a module and the positional and keyword arguments of a call of it."""


class KeepsCalls(Protocol):
    """What keeps something during a call of a module: a hook, or the `CallStack` of an installation."""

    def abandon(self, kept: Any) -> None:
        """Give up what was kept for a call: KeyboardInterrupt or SystemExit has ended it, or the hooks are removed."""


@dataclass(eq=False, slots=True)
class OpenCall:
    """A call of a module that has not ended.

    frame: in which torch runs it
    kept:  what hooks keep until the call ends
    """

    frame: FrameType
    kept: dict[KeepsCalls, Any]

    @property
    def ended(self) -> bool:
        """Whether the call has ended, in any thread, without a hook that was told so."""
        return finished(self.frame)


class _Thread(local):
    """The open calls of one thread, the innermost last."""

    def __init__(self) -> None:
        self.calls = list[OpenCall]()


_thread = _Thread()


def open_calls() -> Sequence[OpenCall]:
    """The open calls of this thread in which something is kept, the innermost last."""
    return _thread.calls


def begin_call(owner: KeepsCalls, kept: Any = None) -> OpenCall:
    """Keep something for a call until `end_call`. To be called in a pre-hook, for the call for which it runs."""
    drop_ended()
    calls = _thread.calls
    frame = call_frame()
    if calls and calls[-1].frame is frame and owner not in calls[-1].kept:
        call = calls[-1]
        call.kept[owner] = kept
    else:
        call = OpenCall(frame, {owner: kept})
        calls.append(call)
    return call


def end_call(owner: KeepsCalls) -> Any:
    """Give up and return what the owner keeps for the call for which this hook runs; None if it has not begun it."""
    calls = _thread.calls
    frame = call_frame()
    while calls:
        call = calls[-1]
        if call.frame is frame:
            kept = call.kept.pop(owner, None)
            if not call.kept:
                calls.pop()
            return kept
        if not finished(call.frame):
            break  # the hooks were installed during the call
        _drop(calls.pop())
    return None


def drop_ended() -> None:
    """Give up what is kept for calls of this thread that KeyboardInterrupt or SystemExit has ended."""
    calls = _thread.calls
    while calls and finished(calls[-1].frame):
        _drop(calls.pop())


def _drop(call: OpenCall) -> None:
    for owner, kept in reversed(call.kept.items()):
        if kept is not None:
            owner.abandon(kept)


def forget(owner: KeepsCalls) -> None:
    """Give up what the owner keeps for calls of this thread: its hooks are removed."""
    if not _thread.calls:
        return
    drop_ended()
    for call in reversed(tuple(_thread.calls)):
        kept = call.kept.pop(owner, None)
        if kept is not None:
            owner.abandon(kept)
        if not call.kept:
            _thread.calls.remove(call)


@dataclass(eq=False, slots=True)
class Forward:
    """What belongs to one forward, and is dropped when it ends.

    numbers:   how many calls each `Calls` has numbered in it
    fired_before: how often each site that counts its calls had fired before it
    tokens:    the pass over the tokens that it computes; None: not known, or not read yet
    source:    the open call whose arguments have them
    labels:    which tokens of the decoder have a label, if it makes the tokens from labels
    passed_on: (hook name, module path) -> what a capture has seen last in it, for hooks that fire later in it
    at_end:    functions that are called when it ends, the last one first
    """

    numbers: Counter[Calls] = field(default_factory=Counter)
    fired_before: dict[Any, int] = field(default_factory=dict)
    tokens: Pass | None = None
    source: WatchedCall | None = None
    labels: Tensor | None = None
    passed_on: dict[tuple[str, str | None], Tensor] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class WatchedCall:
    """What a `CallStack` keeps for an open call of a watched module.

    caller:    the watched call around it; None: it is the outermost one
    outermost: the module of the outermost one
    numbers:   what numbers the calls of the module; None: they are not numbered
    number:    by which it has numbered this call
    """

    module: nn.Module
    caller: WatchedCall | None
    outermost: nn.Module
    forward: Forward
    numbers: Calls | None
    number: Call | None = None


class CallStack(local):
    """The open calls of the watched modules of one installation, in each thread.

    If the outermost module is called again inside its call (by itself, or by a hook's function), that call has a
    `Forward` of its own, so that nothing of it is taken for the outer one's; but calls are numbered on.

    innermost: the innermost open call; None: there is none
    upcoming:  the forward that begins next

    begins: called at the beginning of each forward, in any thread
    ends:   called at the end of each forward, with the outermost module, its arguments and its output
    """

    def __init__(self, begins: list[CallFunction], ends: list[CallFunction]) -> None:
        # called once for each thread, with the same arguments
        self.innermost: WatchedCall | None = None
        self.upcoming = Forward()
        self.begins = begins
        self.ends = ends

    @property
    def forward(self) -> Forward:
        """The forward that encloses this line, else the next one."""
        return self.upcoming if self.innermost is None else self.innermost.forward

    def enter(
        self,
        watched: nn.Module,
        numbers: Calls | None,
        reads: Sequence[CallFunction],
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        """A forward pre-hook of a watched module, registered with kwargs, before all others.

        A call that activation checkpointing repeats in the backward pass begins no forward.

        numbers: numbers the calls of the module
        reads:   read the tokens of its calls
        """
        opened = begin_call(self)
        caller = self.innermost
        outermost = watched if caller is None else caller.outermost
        begins = outermost is watched
        if caller is None:
            forward = self.upcoming
            if repeating() is not None:
                begins = False
                forward = Forward()
        elif begins:
            forward = Forward(caller.forward.numbers, caller.forward.fired_before)
        else:
            forward = caller.forward
        opened.kept[self] = self.innermost = call = WatchedCall(watched, caller, outermost, forward, numbers)
        if begins:
            for function in self.begins:
                function(module, args, kwargs)
        for function in reads:
            function(module, args, kwargs)
        if numbers is not None:
            call.number = numbers.begin(forward.numbers)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of a watched module, which runs after all others, also when the forward raised."""
        call: WatchedCall | None = end_call(self)
        if call is None:
            return
        forward = call.forward
        if forward.source is call:
            forward.source = None
        self.innermost = call.caller
        if call.caller is not None and call.caller.forward is forward:
            return
        for function in reversed(forward.at_end):
            function()
        if forward is self.upcoming:
            self.upcoming = Forward()
            for end in self.ends:
                end(module, args, output)

    def abandon(self, kept: WatchedCall) -> None:
        """The forward of the call is not continued."""
        if kept.forward.source is kept:
            kept.forward.source = None
        self.innermost = kept.caller
        self.upcoming = Forward()

    def at_end(self, module: nn.Module) -> list[Callable[[], None]]:
        """The functions that are called at the end of the forward around a call of the module.

        If there is no other call around it, nobody reads the list.
        """
        call = self.innermost
        while call is not None and call.module is module:
            call = call.caller
        return [] if call is None else call.forward.at_end


def with_callers(
    model: nn.Module,
    modules: Collection[nn.Module],
    inner: Collection[nn.Module] = (),
    points: PointsAt = MappingProxyType({}),
) -> dict[int, nn.Module]:
    """By id: these modules, and all modules around them or around those in `inner`, children first.

    points: those that hooks add at a module, which is around them
    """
    wanted = set(map(id, modules))
    only_inside = set(map(id, inner))
    followed: dict[int, nn.Module] = {}
    for module in children_first(model, points):
        children = set(map(id, (*module._modules.values(), *points.get(id(module), ()))))
        if id(module) in wanted or children & followed.keys() or children & only_inside:
            followed[id(module)] = module
    return followed


class Calls:
    """Numbers the calls of one module, separately in each thread.

    total: how many calls there have been, recomputations not counted

    tokens: returns the pass over the tokens that a call belongs to
    """

    def __init__(self, stack: CallStack, tokens: Callable[[], Pass | None]) -> None:
        self._stack = stack
        self._tokens = tokens
        self.total = 0
        self._in_thread = local()  # `latest`: the last call in each thread
        self._totals = count()
        self._logs = WeakKeyDictionary[object, Log]()

    @property
    def now(self) -> Call:
        """The call of the module that encloses this line, or else the last one in this thread."""
        call = self._stack.innermost
        while call is not None:
            if call.numbers is self and call.number is not None:
                return call.number
            call = call.caller
        latest: Call = self._in_thread.__dict__.setdefault("latest", Call(0, 0, None, Counter()))
        return latest

    def begin(self, counted: Counter[Calls]) -> Call:
        """Number a call of the module that begins, or find the one that is repeated.

        counted: the calls of the forward so far
        """
        around = regions()
        call = None
        if around.repeated is not None and around.repeated in self._logs:
            call = self._logs[around.repeated].repeat()
        if call is None:
            call = Call(counted[self], next(self._totals), self._tokens(), Counter())
            counted[self] += 1
            self.total = call.total + 1
        for region in around.first:
            self._logs.setdefault(region, Log()).calls.append(call)
        self._in_thread.latest = call
        return call

    def go_on_from(self, total: int) -> None:
        """Continue numbering as after `total` calls."""
        self._totals = count(total)
        self.total = total

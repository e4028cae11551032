"""Which call is this? The open calls of each thread, the forwards that they make up, and their numbers.

A forward begins with the outermost call of any module of the model when none is open in this thread, and ends with that
call. A call of the root is one case; `model.encode(x)`, each encoder of a pair, and the network that a `training_step`
calls are others.

Not every module is watched: those that need it (their calls are numbered, a hook takes what another one has seen, they
take tokens), and the modules around them. This is the same: a call of any other module has none of these inside it, so
whatever it begins ends before one of their hooks fires. The exception is a module that calls one which is not below it,
such as a member of a plain list: its call is not seen.

The entries come from a forward pre-hook that runs first and a hook that runs last, also when the forward raised. After
KeyboardInterrupt and SystemExit torch runs no hook: the frame of such a call has ended, by which it is found later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import local
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hookrun.engine.plan.model_tree import children_first
from hookrun.engine.runtime.checkpointing import Call, Log, regions, repeating
from hookrun.engine.runtime.frames import call_frame, finished

if TYPE_CHECKING:
    from hookrun.engine.runtime.tokens.calls import Pass

CallFunction = Callable[[nn.Module, Any, Any], object]
"""A function of a module and the positional and keyword arguments of a call of it."""


@dataclass(eq=False, slots=True)
class Forward:
    """What belongs to one forward, and is dropped when it ends.

    numbers:   how many calls each `Calls` has numbered in it
    tokens:    the pass over the tokens that it computes; None: not known, or not read yet
    source:    the call whose arguments have them
    labels:    which tokens of the decoder have a label, if it makes the tokens from labels
    passed_on: (hook name, module path) -> what a capture has seen last in it, for hooks that fire later in it
    at_end:    functions that are called when it ends, the last one first
    """

    numbers: Counter[Calls] = field(default_factory=Counter)
    tokens: Pass | None = None
    source: OpenCall | None = None
    labels: Tensor | None = None
    passed_on: dict[tuple[str, str | None], Tensor] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class OpenCall:
    """A call that has not ended.

    frame:   of the call
    numbers: what numbers the calls of the module; None: they are not numbered
    number:  by which it has numbered this call
    """

    module: nn.Module
    frame: FrameType
    forward: Forward
    numbers: Calls | None
    number: Call | None = None


class CallStack(local):
    """The open calls of the watched modules, in each thread. One per installation.

    If the outermost module is called again inside its call (by itself, or by a hook's function), that call has a
    `Forward` of its own, so that nothing of it is taken for the outer one's; but calls are numbered on.

    open:     the open calls, the outermost first
    upcoming: the forward that begins next

    begins: called at the beginning of each forward, in any thread
    ends:   called at the end of each forward, with the outermost module, its arguments and its output
    """

    def __init__(self, begins: list[CallFunction], ends: list[CallFunction]) -> None:
        # called once for each thread, with the same arguments
        self.open = list[OpenCall]()
        self.upcoming = Forward()
        self.begins = begins
        self.ends = ends

    @property
    def forward(self) -> Forward:
        """The forward that encloses this line, else the next one."""
        return self.open[-1].forward if self.open else self.upcoming

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
        calls = self.open
        if calls:
            self.drop_ended()
        repeats = not calls and repeating() is not None
        begins = not repeats and (not calls or calls[0].module is watched)
        forward = Forward() if repeats else self.forward
        if begins and calls:
            forward = Forward(forward.numbers)
        call = OpenCall(watched, call_frame(), forward, numbers)
        calls.append(call)
        for function in self.begins if begins else ():
            function(module, args, kwargs)
        for function in reads:
            function(module, args, kwargs)
        if numbers is not None:
            call.number = numbers.begin(forward.numbers)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of a watched module, which runs after all others, also when the forward raised."""
        calls, frame = self.open, call_frame()
        if frame not in [call.frame for call in calls]:
            return  # the hooks were installed during the call
        while (call := calls.pop()).frame is not frame:
            pass
        if calls and calls[-1].forward is call.forward:
            return
        call.forward.source = None  # breaks a reference cycle
        for function in reversed(call.forward.at_end):
            function()
        if call.forward is self.upcoming:
            self.upcoming = Forward()
            for end in self.ends:
                end(module, args, output)

    def drop_ended(self) -> None:
        """Drop the calls that KeyboardInterrupt or SystemExit has ended."""
        while self.open and finished(self.open[-1].frame):
            self.open.pop()
            self.upcoming = Forward()

    def at_end(self, module: nn.Module) -> list[Callable[[], None]]:
        """The functions that are called at the end of the forward around a call of the module.

        If there is no other call around it, nobody reads the list.
        """
        around = [call for call in self.open if call.module is not module]
        return around[-1].forward.at_end if around else []


def with_callers(
    model: nn.Module, modules: Collection[nn.Module], around: Collection[nn.Module] = ()
) -> dict[int, nn.Module]:
    """By id: these modules, and all modules around them or around those in `around`, children first."""
    wanted, below = set(map(id, modules)), set(map(id, around))
    found = dict[int, nn.Module]()
    for module in children_first(model):
        children = map(id, module._modules.values())
        if id(module) in wanted or any(child in found or child in below for child in children):
            found[id(module)] = module
    return found


class Calls:
    """Numbers the calls of one module, separately in each thread.

    total: how many calls there have been, recomputations not counted

    tokens: returns the pass over the tokens that a call belongs to
    """

    def __init__(self, stack: CallStack, tokens: Callable[[], Pass | None]) -> None:
        self._stack = stack
        self._tokens = tokens
        self.total = 0
        self._here = local()  # `latest`: the last call in each thread
        self._totals = count()
        self._logs = WeakKeyDictionary[object, Log]()

    @property
    def now(self) -> Call:
        """The call of the module that encloses this line, or else the last one in this thread."""
        for call in reversed(self._stack.open):
            if call.numbers is self and call.number is not None:
                return call.number
        latest: Call = self._here.__dict__.setdefault("latest", Call(0, 0, None, Counter()))
        return latest

    def begin(self, counted: Counter[Calls]) -> Call:
        """Number a call of the module that begins, or find the one that is repeated.

        counted: the calls of the forward so far
        """
        around = regions()
        log = self._logs.get(around.repeated) if around.repeated is not None else None
        call = log.repeat() if log is not None else None
        if call is None:
            number, total = counted[self], next(self._totals)
            counted[self] = number + 1
            self.total = total + 1
            call = Call(number, total, self._tokens(), Counter())
        for region in around.first:
            self._logs.setdefault(region, Log()).calls.append(call)
        self._here.latest = call
        return call

    def go_on_from(self, total: int) -> None:
        """Continue numbering as after `total` calls."""
        self._totals = count(total)
        self.total = total

"""The clock that `when` reads: step, epoch and mode of a run, and the calls of each module within one forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hookrun.ranks.alone import own_rank
from hookrun.runtime.checkpointing import Call, Log, may_be_checkpointed, regions
from hookrun.runtime.last_good import LastGood
from hookrun.runtime.module_calls import call_frame, frames_of
from hookrun.spec.when import When

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from hookrun.runtime.tokens.passes import Passes


class RowsOfRank(NamedTuple):
    """The places of a rank's rows in a batch of `whole` rows."""

    mine: range
    whole: int


class Moment(NamedTuple):
    """Where a run was. counting: what edits changed was counted."""

    step: int
    epoch: int
    counting: bool


class _Forward(local):
    """The number of the root module's forward that is under way in a thread, from 1."""

    number = 0


class Clock:
    """Where a run is. One per installation.

    step:         optimizer steps in training, batches otherwise; counts from 0
    epoch:        counts from 0
    forward:      the forward of the root module that is under way in this thread
    accumulating: more micro-batches follow before the optimizer steps
    counting:     count what edits change (on the logged steps)
    rows:         this rank's rows of the batch under way; None: the batch is not split
    stands_in:    the pass under way is for other ranks alone: nothing is observed, and no gradient is edited
    samples:      the numbers of the samples in the batch under way, [B] int64; None: not known
    population:   how many samples the numbers are out of; None: not known
    last_good:    where checks that fail at once passed before
    passes:       which tokens the calls of the model compute; None where no hook asks
    on_change:    called when step or epoch changes

    In a loop of the user's own the step is that of the first optimizer that steps the model's parameters, until the
    first call of `advance`.
    """

    __slots__ = (
        "_counted_by_hand",
        "_epoch",
        "_optimizer",
        "_step",
        "accumulating",
        "counting",
        "forward",
        "last_good",
        "model",
        "on_change",
        "passes",
        "population",
        "rows",
        "samples",
        "scaler",
        "stands_in",
    )

    def __init__(self, model: Module, scaler: GradScaler | None = None, counting: bool = False) -> None:
        self.model = model
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.on_change: Callable[[], None] | None = None
        self._step = 0
        self._epoch = 0
        self._counted_by_hand = False
        self._optimizer: ReferenceType[Optimizer] | None = None
        self.forward = _Forward()
        self.accumulating = False
        self.rows: RowsOfRank | None = None
        self.stands_in = False
        self.samples: Tensor | None = None
        self.population: int | None = None
        self.passes: Passes | None = None
        self.last_good = LastGood()
        self.counting = counting

    @property
    def step(self) -> int:
        """Optimizer steps in training, batches otherwise."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._changed()

    @property
    def epoch(self) -> int:
        """Passes over the data."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number
        self._changed()

    def advance(self) -> None:
        """The step is over, says the loop; from now on it says so for each."""
        is_counted = (
            self._optimizer is not None and not self._counted_by_hand
        )  # by the optimizer that was followed
        self._counted_by_hand = True
        if not is_counted:
            self.step += 1

    def place(self, step: int) -> None:
        """The loop says at which step it is; from now on it says so for each."""
        self._counted_by_hand = True
        if step != self._step:
            self.step = step

    def before(self, optimizer: Optimizer) -> None:
        """A step begins with the forward before it: nothing to count."""

    def after(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if self._counted_by_hand:
            return
        if self._optimizer is None or self._optimizer() is None:
            own = {id(parameter) for parameter in self.model.parameters()}
            stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if all(id(parameter) not in own for parameter in stepped):
                return
            self._optimizer = ref(optimizer)
        if self._optimizer() is optimizer:
            self.step += 1

    @property
    def own_samples(self) -> list[int] | None:
        """The numbers of this rank's samples; None where the batch is not split, or they are not known."""
        return None if self.rows is None or self.samples is None else self.samples.tolist()

    @property
    def moment(self) -> Moment:
        """Where the run is."""
        return Moment(self._step, self._epoch, self.counting)

    @contextmanager
    def back_at(self, moment: Moment) -> Iterator[None]:
        """Within the block what is recorded is recorded as of then; schedules are not asked."""
        now = self.moment
        self._step, self._epoch, self.counting = moment
        try:
            yield
        finally:
            self._step, self._epoch, self.counting = now

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    @property
    def mode(self) -> str:
        """``train`` or ``eval``, as the model is."""
        return "train" if self.model.training else "eval"

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, between two steps; of the forwards those of this thread."""
        return {
            "step": self._step,
            "epoch": self._epoch,
            "by_hand": self._counted_by_hand,
            "forward": self.forward.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._counted_by_hand = state["by_hand"]
        self.forward.number = state["forward"]
        self.epoch = state["epoch"]
        self.step = state["step"]

    def loss_scale(self) -> Tensor | None:
        """The factor that the gradient scaler has put on the loss, on its device; None without one."""
        # get_scale() would wait for the device at each gradient
        return None if self.scaler is None else self.scaler._scale


class _Numbers(local):
    """How far the calls of one module are numbered in one thread.

    forward: the forward of the root module that the last call was in
    number:  of the last call within that forward
    latest:  the last call
    """

    forward = -1
    number = -1

    def __init__(self) -> None:
        self.latest = ModuleRun(Call(0, 0))


class ModuleRun:
    """One run of a module.

    call:  which call it is; where activation checkpointing repeats a call, that call
    drawn: how many random draws were made in it, by the seed of who drew
    """

    __slots__ = ("call", "drawn")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.drawn = Counter[int]()


class Calls:
    """Numbers the calls of one module, in each thread for itself.

    total: how many calls there have been, repeated ones not counted
    """

    __slots__ = ("_here", "_logs", "_module", "_runs", "_totals", "clock", "total")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.total = 0
        self._module: Module | None = None
        self._here = _Numbers()
        self._totals = count()
        self._runs = dict[
            int, ModuleRun
        ]()  # by the identity of the frame; a finished frame's is given to another call
        self._logs = WeakKeyDictionary[object, Log]()

    @property
    def run(self) -> ModuleRun:
        """The run under way around this line, or the last one in this thread."""
        if self._module is not None:
            for frame in frames_of(self._module):
                if (found := self._runs.get(id(frame))) is not None:
                    return found
        return self._here.latest

    @property
    def now(self) -> Call:
        """The call under way around this line, or the last one in this thread."""
        return self.run.call

    def count(self, module: Module) -> None:
        """The module is called once more; from a hook of that call."""
        self._module = module
        call = self._call()
        key, self._here.latest = id(call_frame()), ModuleRun(call)
        self._runs.pop(key, None)
        self._runs[key] = self._here.latest
        if len(self._runs) > _MOST_RUNS:
            self._runs.pop(next(iter(self._runs)), None)

    def _call(self) -> Call:
        if not may_be_checkpointed():
            return self._next()
        around = regions()
        log = self._logs.get(around.repeated) if around.repeated is not None else None
        call = (log.repeat() if log is not None else None) or self._next()
        for region in around.first:
            self._logs.setdefault(region, Log()).append(call)
        return call

    def state_dict(self) -> dict[str, int]:
        """How far the calls are numbered, between two calls; within a forward those of this thread."""
        total = next(self._totals)
        self._totals = count(total)
        return {"total": total, "number": self._here.number, "forward": self._here.forward}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on numbering from there."""
        self.go_on_from(state["total"])
        self._here.number, self._here.forward = state["number"], state["forward"]

    def _next(self) -> Call:
        here, forward = self._here, self.clock.forward.number
        here.number = here.number + 1 if here.forward == forward else 0
        here.forward = forward
        number, passes = next(self._totals), self.clock.passes
        self.total = number + 1
        return Call(here.number, number, None if passes is None else passes.current)

    def go_on_from(self, total: int) -> None:
        """As if there had been so many calls."""
        self._totals = count(total)
        self.total = total


_MOST_RUNS = 1024
"""Runs that are remembered for each module: more than can be under way at once."""


def gate(
    when: When, clock: Clock, call: Callable[[], int], draw: Callable[[], float]
) -> Callable[[], bool] | None:
    """A function that says whether the schedule holds now; None where it always does.

    call: the number of the module's call within the forward
    draw: a number from 0 to 1 for the firing under way
    """
    if when.always:
        return None
    tests = list[Callable[[], bool]]()
    if when.mode != "any":
        tests.append(lambda: when.holds_in(clock.model.training))
    if when.step is not None or when.epoch is not None:
        tests.append(lambda: when.holds_at(clock._step, clock._epoch))
    if (calls := when.call) is not None:
        tests.append(lambda: call() in calls)
    if (ranks := when.rank) is not None:
        here = own_rank() in ranks
        tests.append(lambda: here)
    if when.probability < 1:
        probability = when.probability
        tests.append(lambda: draw() < probability)
    return tests[0] if len(tests) == 1 else lambda: all(test() for test in tests)

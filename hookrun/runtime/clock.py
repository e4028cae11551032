"""The clock that `when` reads: step, epoch and mode of a run, and the calls of each module within one forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hookrun.runtime.checkpointing import Call, Log, may_be_checkpointed, regions
from hookrun.spec.when import When

if TYPE_CHECKING:
    from torch.amp import GradScaler


class Clock:
    """Where a run is. One per installation.

    step:         optimizer steps in training, batches otherwise; counts from 0
    epoch:        counts from 0
    forwards:     how many times the root module has been called
    accumulating: more micro-batches follow before the optimizer steps
    counting:     count what edits change (on the logged steps)
    samples:      the numbers of the samples in the batch under way, [B] int64; None: not known
    population:   how many samples the numbers are out of; None: not known
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
        "forwards",
        "model",
        "on_change",
        "population",
        "samples",
        "scaler",
    )

    def __init__(self, model: Module, scaler: GradScaler | None = None, counting: bool = False) -> None:
        self.model = model
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.on_change: Callable[[], None] | None = None
        self._step = 0
        self._epoch = 0
        self._counted_by_hand = False
        self._optimizer: ReferenceType[Optimizer] | None = None
        self.forwards = 0
        self.accumulating = False
        self.samples: Tensor | None = None
        self.population: int | None = None
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

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    @property
    def mode(self) -> str:
        """``train`` or ``eval``, as the model is."""
        return "train" if self.model.training else "eval"

    def loss_scale(self) -> Tensor | None:
        """The factor that the gradient scaler has put on the loss, on its device; None without one."""
        # get_scale() would wait for the device at each gradient
        return None if self.scaler is None else self.scaler._scale


class Calls:
    """Numbers the calls of one module.

    now:  the call under way or the last one; where activation checkpointing repeats a call, that call
    runs: how often the module has run, repetitions included
    """

    __slots__ = ("_forward", "_last", "_logs", "clock", "now", "runs")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now = Call(0, 0)
        self.runs = 0
        self._last = Call(-1, -1)
        self._forward = -1
        self._logs = WeakKeyDictionary[object, Log]()

    def count(self) -> None:
        """The module is called once more."""
        self.runs += 1
        if not may_be_checkpointed():
            self.now = self._next()
            return
        around = regions()
        log = self._logs.get(around.repeated) if around.repeated is not None else None
        self.now = (log.repeat() if log is not None else None) or self._next()
        for region in around.first:
            self._logs.setdefault(region, Log()).append(self.now)

    def _next(self) -> Call:
        again = self._forward == self.clock.forwards
        self._forward = self.clock.forwards
        self._last = Call(self._last.number + 1 if again else 0, self._last.total + 1)
        return self._last


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
    if when.probability < 1:
        probability = when.probability
        tests.append(lambda: draw() < probability)
    return tests[0] if len(tests) == 1 else lambda: all(test() for test in tests)

"""The clock that `when` reads: step, epoch and mode of a run, and the calls of each module within one forward."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

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
    """

    __slots__ = ("accumulating", "counting", "epoch", "forwards", "model", "scaler", "step")

    def __init__(self, model: Module, scaler: GradScaler | None = None, counting: bool = False) -> None:
        self.model = model
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.step = 0
        self.epoch = 0
        self.forwards = 0
        self.accumulating = False
        self.counting = counting

    @property
    def mode(self) -> str:
        """``train`` or ``eval``, as the model is."""
        return "train" if self.model.training else "eval"

    def loss_scale(self) -> Tensor | None:
        """The factor that the gradient scaler has put on the loss, on its device; None without one."""
        # get_scale() would wait for the device at each gradient
        return None if self.scaler is None else self.scaler._scale


class Calls:
    """How many times one module has been called in the forward under way."""

    __slots__ = ("clock", "forward", "number")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.forward = -1
        self.number = 0

    def count(self) -> None:
        """The module is called once more."""
        if self.forward == self.clock.forwards:
            self.number += 1
        else:
            self.forward, self.number = self.clock.forwards, 0


def derived_seed(*parts: object) -> int:
    """A seed that depends on every part, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def gate(when: When, clock: Clock, call: Callable[[], int], seed: int) -> Callable[[], bool] | None:
    """A function that says whether the schedule holds now; None where it always does."""
    if when.always:
        return None
    tests = list[Callable[[], bool]]()
    if when.mode != "any":
        training = when.mode == "train"
        tests.append(lambda: clock.model.training == training)
    if (steps := when.step) is not None:
        tests.append(lambda: clock.step in steps)
    if (epochs := when.epoch) is not None:
        tests.append(lambda: clock.epoch in epochs)
    if (calls := when.call) is not None:
        tests.append(lambda: call() in calls)
    if when.probability < 1:  # drawn last: only firings that the rest of the schedule lets through use it up
        draw, probability = random.Random(seed).random, when.probability
        tests.append(lambda: draw() < probability)
    return tests[0] if len(tests) == 1 else lambda: all(test() for test in tests)

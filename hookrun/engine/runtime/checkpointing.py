"""Activation checkpointing: hooks in a recomputed call act as in the original call, and are not counted again.

`torch.utils.checkpoint` runs a region a second time during the backward pass, through the same modules and their hooks.
torch has no API that tells a recomputation, so the region is found on the Python stack, by the objects with which torch
itself identifies it.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from hookrun.engine.runtime.frames import outward
from hookrun.errors import HookrunError

if TYPE_CHECKING:
    from hookrun.engine.runtime.tokens.calls import Pass

graph_task = torch._C._current_graph_task_id
"""The number of the current backward pass in this thread; `NO_BACKWARD` outside a backward pass."""

NO_BACKWARD = -1

PASSED_ON = (HookrunError, checkpoint._StopRecomputationError)
"""Exceptions of an action that are not wrapped in a HookError; torch raises the second to end a recomputation early."""


@dataclass(frozen=True, slots=True)
class Regions:
    """The checkpointed regions around a call of a module.

    first:    those that run for the first time: the backward pass will recompute the call
    repeated: the one that is being recomputed, or None
    """

    first: tuple[object, ...]
    repeated: object | None

    @property
    def keeps_graph(self) -> bool:
        """Whether the backward pass uses the graph of the first run (non-reentrant), not that of the recomputation."""
        return isinstance(self.repeated, checkpoint._CheckpointFrame)


def regions() -> Regions:
    """The checkpointed regions around the caller; walks up the stack, which takes a few microseconds."""
    may_be_inside = (
        graph_task() != NO_BACKWARD
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
    )
    if not may_be_inside:
        return Regions((), None)
    first: list[object] = []
    for frame in outward(sys._getframe(1)):
        if frame.f_code.co_filename != checkpoint.__file__:
            continue
        around = _region(frame)
        if around is None:
            continue
        region, repeated = around
        if repeated:
            return Regions(tuple(first), region)
        first.append(region)
    return Regions(tuple(first), None)


def _region(frame: FrameType) -> tuple[object, bool] | None:
    """The region of a frame of `torch.utils.checkpoint`, and whether the frame recomputes it, or None."""
    for value in frame.f_locals.values():
        if isinstance(value, FunctionCtx):  # reentrant
            return value, frame.f_code.co_name == "backward"
        if isinstance(value, checkpoint._CheckpointFrame):
            return value, True
        if isinstance(value, GeneratorType) and value.gi_frame is not None:
            for inside in value.gi_frame.f_locals.values():
                if isinstance(inside, checkpoint._CheckpointFrame):
                    return inside, False
    return None


def repeating() -> Regions | None:
    """The regions around this call if it is a recomputation, else None."""
    if graph_task() == NO_BACKWARD:
        return None
    around = regions()
    if around.repeated is None:
        return None
    return around


def require_no_checkpoint() -> None:
    """ValueError inside a checkpointed region: a value of this forward is gone when the region is recomputed."""
    if regions().first:
        raise ValueError(
            "activation checkpointing computes this module again in the backward pass, when the values that other "
            "hooks have seen in the forward are gone: switch it off, or take the value from a run"
        )


class Call(NamedTuple):
    """One execution of a module: a call, or its recomputation under activation checkpointing, with the same numbers.

    number: of the call within its forward of the root module, from 0
    total:  since the installation, from 0
    tokens: the pass over the tokens that it belongs to; None if no hook has `tokens`
    drawn:  how many random draws were made in this execution, by the seed of the hook at this module
    """

    number: int
    total: int
    tokens: Pass | None
    drawn: Counter[int]


@dataclass
class Log:
    """The calls of one module within one region, in order, and how many of them each backward pass has recomputed.

    calls: those of the region's first run
    """

    calls: list[Call] = field(default_factory=list)
    _repeated: Counter[int] = field(default_factory=Counter)

    def repeat(self) -> Call | None:
        """The call that the current backward pass recomputes next; None if the first run had no such call."""
        position = self._repeated[graph_task()]
        self._repeated[graph_task()] += 1
        if position >= len(self.calls):
            return None
        return self.calls[position]._replace(drawn=Counter())

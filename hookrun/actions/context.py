"""Where a firing takes place, for a user's own function that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module


@dataclass(frozen=True, slots=True)
class HookContext:
    """The firing under way.

    hook:      the hook's name
    hook_type: when it fires: ``forward``, ``grad``, ...
    path:      of the module that is hooked, or of the parameter; empty for the model itself
    module:    that module; the one that owns the parameter
    mode:      ``train`` or ``eval``, as the model is
    epoch:     from 0
    step:      from 0: optimizer steps in training, batches otherwise
    call:      of the module within one forward of the model, from 0, where calls are told apart
    target:    the path of the tensor within the value that the hook sees, as far as the hook names it; else empty
    generator: tensor -> a generator on its device, seeded for this one draw: the same numbers in every run, and again
               where activation checkpointing repeats the call
    """

    hook: str
    hook_type: str
    path: str
    module: Module
    mode: str
    epoch: int
    step: int
    call: int
    target: str
    generator: Callable[[Tensor], Generator]

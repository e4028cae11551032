"""The context of a firing, for a user's own function that takes a parameter `context`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module


@dataclass(frozen=True, slots=True)
class HookContext:
    """The current firing of a hook.

    hook:      the hook's name
    hook_type: when it fires: ``forward``, ``grad``, ...
    path:      path of the hooked module or parameter; empty for the model itself
    module:    the hooked module, or the module that owns the parameter
    mode:      ``train`` or ``eval``, the mode of the model
    epoch:     from 0
    step:      from 0: optimizer steps in training, batches otherwise
    call:      number of the module's call within one forward of the model, from 0, if calls are counted
    target:    the hook's `target`, the path of the tensor within the value; empty if it has none
    generator: tensor -> a generator on its device, seeded for this draw: the same numbers in every run, and when
               activation checkpointing repeats the call
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

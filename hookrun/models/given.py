"""A module given from Python, `name: given`, in place of one that `model.*` names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn

from hookrun.errors import counted, reason, refused_at, spec_error

WHERE = "model"


@dataclass(frozen=True, eq=False)
class _Lent:
    """A module while runs use it.

    required: parameter -> whether it required gradients at first
    copies:   whether each run gets a copy of its own
    """

    module: nn.Module
    required: dict[str, bool]
    copies: bool

    def require(self) -> None:
        """Let the parameters require gradients that did so at first."""
        for name, parameter in self.module.named_parameters():
            if name in self.required:
                parameter.requires_grad_(self.required[name])


_lent: ContextVar[_Lent | None] = ContextVar("lent module", default=None)


@contextmanager
def module_lent(module: nn.Module, *, copies: bool) -> Iterator[None]:
    """Within the block `model.name: given` is this module.

    Afterwards it is on its device and in its modes, and the gradients of its parameters are as before; its weights are
    as the last run has left them.

    copies: whether each run gets a copy of its own, and the module itself is not changed
    """
    modes = {each: each.training for each in module.modules()}
    devices = {parameter.device for parameter in module.parameters()}
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    required = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    lent = _Lent(module, required, copies)
    token = _lent.set(lent)
    try:
        yield
    finally:
        _lent.reset(token)
        lent.require()
        for each, training in modes.items():
            each.training = training
        if len(devices) == 1:  # a module on several is not moved
            module.to(devices.pop())
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def origin_of_lent() -> str:
    """Where the weights come from, and how many hooks the module has of its own."""
    lent = _lent.get()
    count = 0
    for each in () if lent is None else lent.module.modules():
        for hooks in (
            each._forward_pre_hooks,
            each._forward_hooks,
            each._backward_pre_hooks,
            each._backward_hooks,
        ):
            count += len(hooks)
    origin = "those of the module that was given from Python"
    if not count:
        return origin
    return f"{origin}; {counted(count, 'hook')} of its own on it: they run too, and before it in a trial run"


def lent_module() -> nn.Module:
    """The module for one run. Raises SpecError if none is given, or if it cannot be copied."""
    lent = _lent.get()
    if lent is None:
        raise spec_error(
            f"{WHERE}.name",
            "is a module that was given from Python",
            "give it again: hookrun.run(…, model=MODULE), or name a model",
        )
    lent.require()  # a run before, or its check, may have frozen some
    if not lent.copies:
        return lent.module
    with refused_at(
        WHERE, "run the jobs one by one", kinds=Exception, what="cannot be copied: ", tell=reason
    ):
        return copy.deepcopy(lent.module)

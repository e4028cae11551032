"""A module given from Python, `name: given`, in place of one that `model.*` names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn

from hookrun.errors import counted, reason, refused_at, spec_error

ORIGIN = "those of the module that was given from Python"


@dataclass(frozen=True, eq=False)
class _Lent:
    """A module while runs use it.

    required: parameter -> whether it required gradients at first
    copies:   whether each run gets a copy of its own
    """

    module: nn.Module
    required: dict[nn.Parameter, bool]
    copies: bool

    def require(self) -> None:
        """Let the parameters require gradients that did so at first."""
        for parameter, requires in self.required.items():
            if parameter.requires_grad != requires:  # those of inference mode cannot be told
                parameter.requires_grad_(requires)


_lent: ContextVar[_Lent | None] = ContextVar("lent module", default=None)


@contextmanager
def module_lent(module: nn.Module, *, copies: bool) -> Iterator[None]:
    """Within the block `model.name: given` is this module.

    Afterwards it is on its device and in its modes, and the gradients of its parameters are as before; its weights are
    as the last run has left them.

    copies: whether each run gets a copy of its own, and the module itself is not changed
    """
    modes = {each: each.training for each in module.modules()}
    required = {parameter: parameter.requires_grad for parameter in module.parameters()}
    gradients = {parameter: parameter.grad for parameter in required}
    devices = {parameter.device for parameter in required}
    lent = _Lent(module, required, copies)
    token = _lent.set(lent)
    try:
        yield
    finally:
        _lent.reset(token)
        if len(devices) == 1:  # a module on several is not moved
            module.to(devices.pop())
        lent.require()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for each, is_training in modes.items():
            each.training = is_training


def lent_module() -> nn.Module:
    """The module for one run. Raises SpecError if none is given, or if it cannot be copied."""
    lent = _lent.get()
    if lent is None:
        hint = "give it again: hookrun.run(…, model=MODULE)"
        raise spec_error("model.name", "the model was given from Python, and is not stored", hint)
    lent.require()  # a run before, or its check, may have frozen some
    if not lent.copies:
        return lent.module
    what = "a job of a sweep needs a copy of the module: "
    with refused_at("model", "run the jobs one by one", kinds=Exception, what=what, tell=reason):
        return copy.deepcopy(lent.module)


def origin_of_lent() -> str:
    """Where its weights come from, and how many hooks the module has of its own."""
    lent = _lent.get()
    count = 0
    for each in lent.module.modules() if lent is not None else ():
        count += len(each._forward_pre_hooks) + len(each._forward_hooks) + len(each._backward_hooks)
    if not count:
        return ORIGIN
    return f"{ORIGIN}, with {counted(count, 'hook')} of its own, which also run in the trial run"

"""`grad` and `post_accumulate_grad`: the gradient of a parameter, and the elements of a parameter that stay 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.engine.hook_types import GRAD, POST_ACCUMULATE_GRAD
from hookrun.engine.runtime.hooks.base import ParameterHook, write
from hookrun.engine.runtime.sharded import HookedParameter, edited, is_sharded, like, own_part


class ParameterGrad(ParameterHook):
    """`grad`: the gradient of a parameter, before it is accumulated."""

    hook_types = (GRAD,)
    before_accumulation = True

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register a tensor hook."""
        return parameter.register_hook(self.grad)

    def grad(self, grad: Tensor) -> Tensor | None:
        """torch's tensor hook."""
        if self.waits is not None and self.waits():
            return None
        new = grad
        for firing in self.firings:
            new = firing.op(new)
        return None if new is grad else new

    def reduced(self, parameter: nn.Parameter) -> None:
        """Act on the gradient that was summed over all ranks; a parameter without a gradient is left out."""
        grad = parameter.grad
        if grad is not None:
            parameter.grad = edited(grad, self.firings)


class AccumulatedGrad(ParameterHook):
    """`post_accumulate_grad`: the accumulated gradient of a parameter, once per optimizer step."""

    hook_types = (POST_ACCUMULATE_GRAD,)

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register a post-accumulate-grad hook."""
        return parameter.register_post_accumulate_grad_hook(self.accumulated)

    def accumulated(self, parameter: nn.Parameter) -> None:
        """torch's post-accumulate-grad hook."""
        if self.waits is None or not self.waits():
            self.reduced(parameter)

    def reduced(self, parameter: nn.Parameter) -> None:
        """Act on a gradient that is accumulated and summed over all ranks, unless more micro-batches follow."""
        grad = parameter.grad
        if grad is None or any(firing.site.clock.accumulating for firing in self.firings):
            return
        new = edited(grad, self.firings)
        if grad.requires_grad:  # by create_graph=True: a write would be hidden from the second derivative
            parameter.grad = new
        else:
            write(grad, new)


class KeptZero(ParameterHook):
    """Elements of one parameter that stay 0, as the mask of torch.nn.utils.prune keeps them.

    They are set to 0 in each gradient, and in the parameter after each optimizer step. Whatever else writes into the
    parameter, `load_state_dict` for one, is noticed at the next forward of the model.

    free:      bool, False where the element stays 0
    chosen_by: the names of the hooks that have chosen elements
    """

    def __init__(self, place: HookedParameter) -> None:
        self.place = place
        self.free = torch.ones(place.parameter.shape, dtype=torch.bool)
        self.chosen_by = set[str]()
        self._version = -1

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register a tensor hook: the sum over ranks of gradients with zeros has the same zeros."""
        return parameter.register_hook(self.grad)

    def grad(self, grad: Tensor) -> Tensor:
        """torch's tensor hook."""
        return grad * self._free_part()

    def reduced(self, parameter: nn.Parameter) -> None:
        """The same for a sharded parameter, whose tensor hooks torch never calls."""
        grad = parameter.grad
        if grad is not None and is_sharded(grad):
            own_part(grad).mul_(self._free_part())

    @property
    def is_changed(self) -> bool:
        """Whether the parameter was written to since it was last set to 0 here."""
        part = own_part(self.place.parameter)
        return part.is_inference() or part._version != self._version

    @torch.no_grad()
    def fill(self) -> None:
        """Set the elements to 0."""
        part = own_part(self.place.parameter)
        part.masked_fill_(~self._free_part(), 0)
        self._version = -1 if part.is_inference() else part._version

    def state_dict(self) -> dict[str, Tensor]:
        """Which elements stay 0, for a resumed run."""
        return {"free": self.free}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the elements of a saved state at 0; they are set to 0 at the next forward."""
        self.free = state["free"]
        self._version = -1

    def _free_part(self) -> Tensor:
        """`free`, on the parameter's device; of a sharded parameter this rank's part."""
        self.free = self.free.to(self.place.parameter.device)
        return own_part(like(self.free, self.place.parameter))

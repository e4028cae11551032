"""`grad` and `post_accumulate_grad`: the gradient of a parameter, before and after it is accumulated."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.hook_types import GRAD, POST_ACCUMULATE_GRAD
from hookrun.runtime.hooks.base import ParameterHook, write
from hookrun.runtime.sharded import edited


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
        if (grad := parameter.grad) is not None:
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

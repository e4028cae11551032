"""Gradient clipping over all trained parameters together: `train.clip_grad_norm` and `train.clip_grad_value`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from hookrun.runtime.sharded import whole
from hookrun.spec.experiment import Train


def clip(train: Train, optimizer: Optimizer) -> Tensor | None:
    """Clip the optimizer's gradients, which are already unscaled and accumulated.

    `grad` and `post_accumulate_grad` hooks run before the clipping, `optimizer_step_pre` hooks after it.

    Returns the total norm of the gradients before clipping, a tensor without dimensions; None if nothing is clipped.
    """
    if train.clip_grad_norm is not None:
        norm: Tensor = clip_grad_norm_(_parameters(optimizer), train.clip_grad_norm)
        return whole(norm)
    if train.clip_grad_value is not None:
        parameters = _parameters(optimizer)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        clip_grad_value_(parameters, train.clip_grad_value)
        return whole(norm)
    return None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

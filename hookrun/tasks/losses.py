"""Losses by name, and what a model's output is to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hookrun.compiler.tensors import children
from hookrun.errors import HookrunError, Problem, SpecError, nearest

Loss = Callable[[Any, Tensor], Tensor]


def main_tensor(output: Any) -> Tensor:
    """The tensor that a loss or a prediction is about: the output itself, `logits` or `out` of it, or its first."""
    if isinstance(output, Tensor):
        return output
    members = dict(children(output))
    for key in ("logits", "out", "loss"):
        if isinstance(members.get(key), Tensor):
            return members[key]  # type: ignore[no-any-return]
    for member in members.values():
        if isinstance(member, Tensor):
            return member
    raise HookrunError(
        f"the model returned a {type(output).__name__}, in which there is no tensor to compute a loss of"
    )


def _own_loss(output: Any, target: Tensor) -> Tensor:
    loss = dict(children(output)).get("loss", output)
    loss = main_tensor(loss)
    if loss.numel() != 1:
        raise HookrunError(f"train.loss=output: the model returned shape {list(loss.shape)}, not one number")
    return loss.reshape(())


def _of(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda output, target: function(main_tensor(output), target)


def _like_output(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    def loss(output: Any, target: Tensor) -> Tensor:
        found = main_tensor(output)
        return function(
            found, target.to(found.dtype).reshape(found.shape) if target.numel() == found.numel() else target
        )

    return loss


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": _of(F.cross_entropy),
    "nll": _of(F.nll_loss),
    "mse": _like_output(F.mse_loss),
    "l1": _like_output(F.l1_loss),
    "smooth_l1": _like_output(F.smooth_l1_loss),
    "huber": _like_output(F.huber_loss),
    "bce": _like_output(F.binary_cross_entropy_with_logits),
    "output": _own_loss,
    "output_mean": lambda output, target: main_tensor(output).mean(),
    "output_sum": lambda output, target: main_tensor(output).sum(),
}
"""`output` is the model's own loss, `output_mean` and `output_sum` make one of whatever it returns."""

NEED_TARGET = frozenset(LOSSES) - {"output", "output_mean", "output_sum"}


def loss_named(name: str) -> Loss:
    """The loss. Raises SpecError for an unknown name."""
    if name not in LOSSES:
        raise SpecError([Problem("train.loss", f"found {name!r}, which is no loss", nearest(name, LOSSES))])
    return LOSSES[name]


def correct(output: Any, target: Tensor) -> Tensor | None:
    """How many samples of a batch are classified right, as a tensor; None where the targets are no labels."""
    scores = main_tensor(output)
    if target.is_floating_point() or scores.dim() < 2 or scores.shape[:1] + scores.shape[2:] != target.shape:
        return None
    return (
        (scores.detach().argmax(1) == target).float().flatten(1).mean(1).sum()
        if target.dim() > 1
        else (scores.detach().argmax(1) == target).sum()
    )

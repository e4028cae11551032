"""Losses by name, and what a model's output is to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hookrun.containers import children
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


def _of_scores(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss of class scores [B, classes, ...] against labels [B, ...], or against probabilities like the scores."""

    def loss(output: Any, target: Tensor) -> Tensor:
        scores = main_tensor(output)
        if not _labels(scores, target) and scores.shape != target.shape:
            raise _misfit(
                name, scores, target, "it takes scores [batch, classes, ...] and labels [batch, ...]"
            )
        return function(scores, target)

    return loss


def _of_values(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss that compares numbers one by one; targets of as many numbers take the output's shape."""

    def loss(output: Any, target: Tensor) -> Tensor:
        values = main_tensor(output)
        if values.numel() != target.numel() or (values.dim() > 0 and values.shape[0] != target.shape[0]):
            raise _misfit(name, values, target, "it takes as many numbers of each sample as its target has")
        return function(values, target.to(values.dtype).reshape(values.shape))

    return loss


def _labels(scores: Tensor, target: Tensor) -> bool:
    return scores.dim() > 1 and scores.shape[:1] + scores.shape[2:] == target.shape


def _misfit(name: str, output: Tensor, target: Tensor, takes: str) -> HookrunError:
    shapes = f"the model returned shape {list(output.shape)} for targets of shape {list(target.shape)}"
    return HookrunError(
        f"train.loss={name}: {shapes}, and {takes}; output_mean and output_sum need no target"
    )


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": _of_scores("cross_entropy", F.cross_entropy),
    "nll": _of_scores("nll", F.nll_loss),
    "mse": _of_values("mse", F.mse_loss),
    "l1": _of_values("l1", F.l1_loss),
    "smooth_l1": _of_values("smooth_l1", F.smooth_l1_loss),
    "huber": _of_values("huber", F.huber_loss),
    "bce": _of_values("bce", F.binary_cross_entropy_with_logits),
    "output": _own_loss,
    "output_mean": lambda output, target: main_tensor(output).mean(),
    "output_sum": lambda output, target: main_tensor(output).sum(),
}
"""`output` is the model's own loss, `output_mean` and `output_sum` make one of whatever it returns."""

NEED_TARGET = frozenset(LOSSES) - {"output", "output_mean", "output_sum"}


def loss_named(name: str) -> Loss:
    """The loss. Raises SpecError for an unknown name."""
    if name not in LOSSES:
        raise SpecError(
            [Problem("train.loss", f"found {name!r}, which is not a loss", nearest(name, LOSSES))]
        )
    return LOSSES[name]


def correct(output: Any, target: Tensor) -> Tensor | None:
    """How many samples of a batch are classified right, as a tensor; None where the targets are not labels.

    A sample of several labels (pixels, tokens) counts by the fraction of them that is right.
    """
    scores = main_tensor(output)
    if target.is_floating_point() or not _labels(scores, target):
        return None
    right = scores.detach().argmax(1) == target
    return right.sum() if right.dim() == 1 else right.float().flatten(1).mean(1).sum()

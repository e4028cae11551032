"""Losses by name, and counts of correct predictions, computed from a model's output and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hookrun.arguments import parameters, unknown_arguments
from hookrun.containers import children
from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError, Problem, SpecError, nearest, reason

Loss = Callable[[Any, Tensor], Tensor]

NEXT_TOKEN = "next_token"


def main_tensor(output: Any) -> Tensor:
    """The tensor of an output that is used for losses and predictions.

    It is the output itself, its member `logits`, `out` or `loss`, or its first tensor. HookrunError if there is none.
    """
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
        f"the model returned an object of type {type(output).__name__} without tensors, so a loss cannot be computed"
    )


def _own_loss(output: Any, target: Tensor) -> Tensor:
    loss = dict(children(output)).get("loss", output)
    loss = main_tensor(loss)
    if loss.numel() != 1:
        raise HookrunError(
            f"train.loss=output: the model returned shape {list(loss.shape)}, not one number; "
            "a transformers model computes a loss if data.args.labels=true gives it labels"
        )
    return loss.reshape(())


def _of_scores(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss of class scores [B, classes, ...] and labels [B, ...], or target probabilities [B, classes, ...]."""

    def loss(output: Any, target: Tensor) -> Tensor:
        scores = main_tensor(output)
        if not _labels(scores, target) and scores.shape != target.shape:
            raise _misfit(
                name, scores, target, "it takes scores [batch, classes, ...] and labels [batch, ...]"
            )
        try:
            return function(scores, target)
        except IndexError as error:  # a label beyond the scores; torch does not say how many scores there are
            raise HookrunError(
                f"train.loss={name}: the labels of this batch go from {int(target.min())} to {int(target.max())}, and "
                f"the model returned shape {list(scores.shape)}, scores of the labels 0 to {scores.shape[1] - 1}; "
                "give the model as many classes as the data has, such as model.args.num_classes"
            ) from error

    return loss


def _with_arguments(
    name: str, function: Callable[..., Tensor], args: Mapping[str, Any]
) -> Callable[..., Tensor]:
    """The function with the arguments `args`, with tensors among them moved to the output's device and dtype."""
    if not args:
        return function

    def computed(output: Tensor, target: Tensor) -> Tensor:
        placed = {key: each.to(output) if isinstance(each, Tensor) else each for key, each in args.items()}
        try:
            return function(output, target, **placed)
        except (RuntimeError, ValueError, TypeError) as error:
            shapes = f"an output of shape {list(output.shape)}, targets of shape {list(target.shape)}"
            raise HookrunError(f"train.loss={name} with {', '.join(args)}: {error}; for {shapes}") from error

    return computed


def _of_values(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss that compares elements; targets with as many elements are reshaped to the output's shape."""

    def loss(output: Any, target: Tensor) -> Tensor:
        values = main_tensor(output)
        if values.numel() != target.numel() or (values.dim() > 0 and values.shape[0] != target.shape[0]):
            raise _misfit(name, values, target, "output and target of a sample need as many elements")
        return function(values, target.to(values.dtype).reshape(values.shape))

    return loss


def _next_token(scores: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy over the positions at which a token is to be predicted; 0 if there are none."""
    total = F.cross_entropy(
        scores.flatten(0, -2),
        target.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / (target != IGNORED).sum().clamp(min=1)


def _of_next_tokens(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss of scores [B, length, vocabulary] and the next token at each position [B, length]."""

    def loss(output: Any, target: Tensor) -> Tensor:
        scores = main_tensor(output)
        if scores.dim() < 3 or scores.shape[:-1] != target.shape:
            takes = "it takes scores [batch, length, vocabulary] and next tokens [batch, length]"
            raise _misfit(name, scores, target, takes)
        return function(scores, target)

    return loss


def _labels(scores: Tensor, target: Tensor) -> bool:
    return scores.dim() > 1 and scores.shape[:1] + scores.shape[2:] == target.shape


def _misfit(name: str, output: Tensor, target: Tensor, takes: str) -> HookrunError:
    shapes = f"the model returned shape {list(output.shape)} for targets of shape {list(target.shape)}"
    return HookrunError(
        f"train.loss={name}: {shapes}, and {takes}; output_mean and output_sum need no target"
    )


_FUNCTIONS: Mapping[str, tuple[Callable[..., Loss], Callable[..., Tensor]]] = {
    "cross_entropy": (_of_scores, F.cross_entropy),
    "nll": (_of_scores, F.nll_loss),
    "mse": (_of_values, F.mse_loss),
    "l1": (_of_values, F.l1_loss),
    "smooth_l1": (_of_values, F.smooth_l1_loss),
    "huber": (_of_values, F.huber_loss),
    "next_token": (_of_next_tokens, _next_token),
    "bce": (_of_values, F.binary_cross_entropy_with_logits),
}
"""Losses that need a target: name -> (the wrapper for their shapes, torch's function)."""

_NOT_OURS = ("size_average", "reduce", "reduction")
"""Arguments of torch's functions that are not accepted: the loss would not be a mean over the batch."""

LOSSES: Mapping[str, Loss] = {
    **{name: kind(name, function) for name, (kind, function) in _FUNCTIONS.items()},
    "output": _own_loss,
    "output_mean": lambda output, target: main_tensor(output).mean(),
    "output_sum": lambda output, target: main_tensor(output).sum(),
}
"""`output` is the loss that the model returns; `output_mean` and `output_sum` are computed from any output."""

SUMS = frozenset({"output_sum"})
"""Losses that are a sum over the batch; all others are a mean."""

NEED_TARGET = frozenset(LOSSES) - {"output", "output_mean", "output_sum"}


def loss_named(name: str, args: Mapping[str, Any] = MappingProxyType({})) -> Loss:
    """The loss of this name with the arguments `args`. Raises SpecError for an unknown name."""
    if name not in LOSSES:
        raise SpecError(
            [Problem("train.loss", f"found {name!r}, which is not a loss", nearest(name, LOSSES))]
        )
    if not args:
        return LOSSES[name]
    kind, function = _FUNCTIONS[name]
    return kind(name, _with_arguments(name, function, args))


def loss_arguments(name: str, args: Mapping[str, Any], where: str) -> list[Problem]:
    """A problem for each argument that the loss of this name does not take, or whose value it refuses."""
    _, function = _FUNCTIONS.get(name, (None, None))
    known = {} if function is None else parameters(function) or {}
    own = [key for key in list(known)[2:] if key not in _NOT_OURS]
    problems = unknown_arguments(args, own, where, name)
    if problems or not args or function is None:
        return problems
    classes = max((each.numel() for each in args.values() if isinstance(each, Tensor)), default=3)
    output = torch.full((2, 1, classes) if name == NEXT_TOKEN else (2, classes), 0.5)
    target = (
        output if _FUNCTIONS[name][0] is _of_values else torch.zeros(output.shape[:-1], dtype=torch.int64)
    )
    for key, value in args.items():
        try:
            function(output, target, **{key: value})
        except Exception as error:  # torch's functions raise many types for wrong arguments
            what = f"found {value!r}, which '{name}' refuses: {reason(error)}"
            problems.append(Problem(f"{where}.{key}", what, "correct the value"))
    return problems


LABELS_NEEDED = "class scores [batch, classes, ...] and labels [batch, ...]"
"""The shapes that `correct` needs; it returns None for other targets."""


def correct(output: Any, target: Tensor) -> Tensor | None:
    """The number of correctly classified samples of a batch, a tensor; None if the targets are not labels.

    A sample with several labels (pixels, tokens) counts as the fraction of them that is correct.
    """
    scores = main_tensor(output)
    if target.is_floating_point() or not _labels(scores, target):
        return None
    return _samples(scores.detach().argmax(1) == target)


def correct_among(most: int) -> Callable[[Any, Tensor], Tensor | None]:
    """As `correct`, for labels among the `most` largest scores."""

    def correct_among(output: Any, target: Tensor) -> Tensor | None:
        scores = main_tensor(output)
        if target.is_floating_point() or not _labels(scores, target):
            return None
        largest = scores.detach().topk(min(most, scores.shape[1]), dim=1).indices
        return _samples((largest == target.unsqueeze(1)).any(1))

    return correct_among


def _samples(right: Tensor) -> Tensor:
    """The number of correct samples, from the correctness of each label, bool [batch, ...]."""
    return right.count_nonzero() if right.dim() == 1 else right.float().flatten(1).mean(1).sum()


def differences(measure: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor | None]:
    """A function (output, target) -> the sum over samples of the mean of measure(output - target).

    The function returns None if output and target have different numbers of elements.
    """

    def total(output: Any, target: Tensor) -> Tensor | None:
        values = main_tensor(output).detach()
        if values.numel() != target.numel() or not values.numel():
            return None
        mean = measure(values.float() - target.reshape(values.shape).float()).mean()
        return mean * (target.shape[0] if target.dim() else 1)

    return total

"""The loss of an experiment: one of hookrun's with its arguments, or a function or class of a trusted package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.config.validation import parameters, unknown_arguments, wrong_call
from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError, Problem, SpecError, nearest, reason
from hookrun.spec.experiment import Named
from hookrun.trust.callables import Code
from hookrun.trust.load import LOSSES as KIND
from hookrun.trust.load import Trusted, is_user_code, load, short_names
from hookrun.values.containers import children, tensors

Loss = Callable[[Any, Tensor], Tensor]

WHERE = "train.loss"
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
        if not are_labels(scores, target) and scores.shape != target.shape:
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


def _with_arguments(function: Callable[..., Any], args: Mapping[str, Any]) -> Callable[[Any, Tensor], Any]:
    """The function with the arguments `args`, with tensors among them moved to the output's device and dtype."""
    if not args:
        return function

    def computed(output: Any, target: Tensor) -> Any:
        like = next(tensors(output), target)
        place = like if like.is_floating_point() else like.device
        placed = {key: value.to(place) if isinstance(value, Tensor) else value for key, value in args.items()}
        return function(output, target, **placed)

    return computed


def _explained(name: str, function: Loss, args: Iterable[str]) -> Loss:
    """The same function; an error for wrong arguments names them and the shapes."""

    def computed(output: Tensor, target: Tensor) -> Tensor:
        try:
            return function(output, target)
        except (RuntimeError, ValueError, TypeError) as error:
            shapes = f"an output of shape {list(output.shape)}, targets of shape {list(target.shape)}"
            raise HookrunError(f"{WHERE}={name} with {', '.join(args)}: {error}; for {shapes}") from error

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


def are_labels(scores: Tensor, target: Tensor) -> bool:
    """Whether the shapes are those of class scores [B, classes, ...] and labels [B, ...]."""
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


# ---- the loss of an experiment -------------------------------------------------------------------------------------

NEXT_TOKEN_LOSSES = frozenset({"cross_entropy", NEXT_TOKEN})
"""Names that mean the next-token loss if targets are tokens."""

_TENSORS = ("weight", "pos_weight")
"""Arguments of losses whose lists of numbers are converted to tensors."""


@dataclass(frozen=True)
class TrainLoss:
    """A loss that can be computed.

    needs_target: it needs targets
    sums:         it is the sum over a batch; otherwise the mean
    code:         the code of a user's own loss; None for one of hookrun's
    """

    name: str
    function: Loss
    needs_target: bool
    code: Code | None = None
    sums: bool = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions."""
        return self.function(output, target)

    def to(self, device: torch.device) -> TrainLoss:
        """The same loss, with its tensors moved to the device."""
        function = self.function
        if isinstance(function, UserLoss) and isinstance(function.call, nn.Module):
            function.call.to(device)
        return self


def load_loss(named: Named, *, tokens: bool = False) -> TrainLoss:
    """The loss that `train.loss` names, with checked arguments.

    tokens: targets are the next token of each position; then cross_entropy means `next_token`

    Raises SpecError for an unknown name, for code that is not trusted, and for arguments that the loss does not take.
    """
    args = {key: _as_tensor(key, value) for key, value in named.args.items()}
    if tokens and named.name == "cross_entropy":
        return load_loss(named.model_copy(update={"name": NEXT_TOKEN}))
    if tokens and named.name in NEED_TARGET and named.name != NEXT_TOKEN:
        what = f"{named.name!r} does not compare scores with the next token of each position, the target of the data"
        raise SpecError(
            [Problem(WHERE, what, f"use {NEXT_TOKEN}, or output if the model computes its own loss")]
        )
    if named.name in LOSSES:
        if problems := loss_arguments(named.name, args, WHERE):
            raise SpecError(problems)
        loss = LOSSES[named.name]
        if args:
            kind, function = _FUNCTIONS[named.name]
            loss = kind(named.name, _explained(named.name, _with_arguments(function, args), args))
        return TrainLoss(named.name, loss, named.name in NEED_TARGET, sums=named.name in SUMS)
    if is_user_code(named.name, KIND):
        own = load(named.name, KIND, f"{WHERE}.name" if args else WHERE)
        return TrainLoss(own.name, UserLoss.of(own, args, WHERE), False, own.code)
    known = [*LOSSES, *short_names(KIND)]
    raise SpecError(
        [Problem(WHERE, f"found {named.name!r}, which is not a loss", nearest(named.name, known))]
    )


def _as_tensor(key: str, value: Any) -> Any:
    """Class weights as a tensor; other values as they are. Raises SpecError if the list has a non-number."""
    if key not in _TENSORS or not isinstance(value, list | tuple):
        return value
    try:
        return torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"found {value!r}, expected a list of numbers"
        raise SpecError([Problem(f"{WHERE}.{key}", what)]) from error


class UserFunction:
    """A user's own loss or metric, called with output and targets; its errors name it.

    call: the function with its arguments; for a class, an object of it
    """

    def __init__(self, own: Trusted, call: Callable[[Any, Tensor], Any], where: str) -> None:
        self.call = call
        self._own = own
        self._where = where

    @classmethod
    def of(cls, own: Trusted, args: Mapping[str, Any], where: str) -> Self:
        """The function with these arguments. Raises SpecError if it cannot be called or constructed with them."""
        target: Any = own.target
        is_class = isinstance(target, type)
        problems = wrong_call(target, args, where, own.text, first=0 if is_class else 2)
        if problems:
            raise SpecError(problems)
        if not is_class:
            return cls(own, _with_arguments(target, dict(args)), where)
        try:
            with torch.random.fork_rng(devices=[]):
                made = own(**args)
        except Exception as error:  # the user's own code may raise anything
            raise SpecError([Problem(where, own.failure(error), "correct it, or its arguments")]) from error
        if not callable(made):
            what = f"'{own.text}' is a class whose objects cannot be called"
            hint = "give it a method __call__, or `forward` of a torch.nn.Module"
            raise SpecError([Problem(where, what, hint)])
        call = made.forward if isinstance(made, nn.Module) else made
        if problems := wrong_call(call, (), where, own.text, first=2):
            raise SpecError(problems)
        return cls(own, made, where)

    def __call__(self, output: Any, target: Tensor) -> Any:
        """What the function returns. Raises HookrunError if it fails."""
        try:
            return self.call(output, target)
        except HookrunError:
            raise
        except Exception as error:
            raise HookrunError(f"{self._where}: {self._own.failure(error)}") from error

    def wrong(self, value: Any, expected: str) -> HookrunError:
        """The error for a value that the function must not return."""
        shown = (
            f"a tensor of shape {list(value.shape)} {value.dtype}"
            if isinstance(value, Tensor)
            else repr(value)
        )
        return HookrunError(f"{self._where}: '{self._own.text}' returned {shown[:200]}, {expected}")


class UserLoss(UserFunction):
    """A user's own loss: checks its result."""

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions. Raises HookrunError."""
        loss = super().__call__(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise self.wrong(loss, "expected one floating-point number as a tensor")
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(output))
        if learns and not loss.requires_grad:
            hint = "do not detach it or create a new tensor from its value"
            raise self.wrong(loss, f"a loss that requires no gradient: {hint}")
        return loss.reshape(())

"""The loss of an experiment: one of hookrun's with its arguments, or a function or class of a trusted package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.arguments import wrong_call
from hookrun.callables import Code
from hookrun.containers import tensors
from hookrun.errors import HookrunError, Problem, SpecError, nearest
from hookrun.spec.experiment import Named
from hookrun.tasks.loop.losses import LOSSES, NEED_TARGET, NEXT_TOKEN, SUMS, Loss, loss_arguments, loss_named
from hookrun.trusted import LOSSES as KIND
from hookrun.trusted import Trusted, is_own, load, short_names

WHERE = "train.loss"
NEXT_TOKEN_LOSSES = frozenset({"cross_entropy", NEXT_TOKEN})
"""Names that mean the next-token loss if targets are tokens."""

TENSORS = ("weight", "pos_weight")
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
        if isinstance(function, OwnLoss) and isinstance(function.call, nn.Module):
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
        is_sum = named.name in SUMS
        return TrainLoss(named.name, loss_named(named.name, args), named.name in NEED_TARGET, sums=is_sum)
    if is_own(named.name, KIND):
        own = load(named.name, KIND, f"{WHERE}.name" if args else WHERE)
        return TrainLoss(
            own.name, OwnLoss(own, make_callable(own, args, WHERE, called_with=2)), False, own.code
        )
    known = [*LOSSES, *short_names(KIND)]
    raise SpecError(
        [Problem(WHERE, f"found {named.name!r}, which is not a loss", nearest(named.name, known))]
    )


def _as_tensor(key: str, value: Any) -> Any:
    """Class weights as a tensor; other values as they are. Raises SpecError if the list has a non-number."""
    if key not in TENSORS or not isinstance(value, list | tuple):
        return value
    try:
        return torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"found {value!r}, expected a list of numbers"
        raise SpecError([Problem(f"{WHERE}.{key}", what)]) from error


def make_callable(own: Trusted, args: Mapping[str, Any], where: str, *, called_with: int) -> Any:
    """The function with its arguments; for a class, an object of it that can be called.

    called_with: the number of positional arguments of each call

    Raises SpecError if it cannot be called or constructed with these arguments.
    """
    target: Any = own.target
    problems = wrong_call(target, args, where, own.text, first=0 if isinstance(target, type) else called_with)
    if problems:
        raise SpecError(problems)
    if not isinstance(target, type):
        return _WithArguments(own, dict(args)) if args else target
    try:
        with torch.random.fork_rng(devices=[]):
            found = own(**args)
    except Exception as error:  # the user's own code may raise anything
        raise SpecError([Problem(where, own.failure(error), "correct it, or its arguments")]) from error
    if not callable(found):
        what = f"'{own.text}' is a class whose objects cannot be called"
        raise SpecError(
            [Problem(where, what, "give it a method __call__, or `forward` of a torch.nn.Module")]
        )
    call = found.forward if isinstance(found, nn.Module) else found
    if problems := wrong_call(call, (), where, own.text, first=called_with):
        raise SpecError(problems)
    return found


class _WithArguments:
    """A function with fixed arguments; tensors among them are moved to the device of the output's first tensor."""

    def __init__(self, own: Trusted, args: dict[str, Any]) -> None:
        self._target = own.target
        self._args = args

    def __call__(self, output: Any, target: Tensor) -> Any:
        device = next(tensors(output), target).device
        args = {
            key: each.to(device) if isinstance(each, Tensor) else each for key, each in self._args.items()
        }
        return self._target(output, target, **args)


class OwnLoss:
    """A user's own loss: checks its result, and adds its name to its errors."""

    def __init__(self, own: Trusted, call: Any) -> None:
        self._own = own
        self.call = call

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions. Raises HookrunError."""
        try:
            loss = self.call(output, target)
        except HookrunError:
            raise
        except Exception as error:
            raise HookrunError(f"{WHERE}: {self._own.failure(error)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = (
                f"a tensor of shape {list(loss.shape)} {loss.dtype}"
                if isinstance(loss, Tensor)
                else repr(loss)
            )
            raise HookrunError(
                f"{WHERE}: '{self._own.text}' returned {found[:200]}, expected one floating-point number as a tensor"
            )
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in tensors(output))
        if learns and not loss.requires_grad:
            raise HookrunError(
                f"{WHERE}: '{self._own.text}' returned a loss that requires no gradient: "
                "do not detach it or create a new tensor from its value"
            )
        return loss.reshape(())

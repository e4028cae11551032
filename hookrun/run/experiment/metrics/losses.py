"""The loss of an experiment: one of hookrun's with its arguments, or a function or class of a trusted package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.data import DataInfo
from hookrun.data.samples import IGNORED
from hookrun.engine.hook_types import FORWARD
from hookrun.engine.plan.plan import ResolvedPlan
from hookrun.engine.runtime import Installation
from hookrun.engine.runtime.part import Part
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.trust.callables import Code
from hookrun.engine.trust.load import LOSSES as KIND
from hookrun.engine.trust.load import METRICS, Trusted, load
from hookrun.engine.validation import Section, parameters, unknown_arguments, validated, wrong_call
from hookrun.engine.values.containers import children, tensors
from hookrun.engine.values.index import AnyIndex
from hookrun.errors import HookrunError, Problem, nearest, reason, refuse, spec_error
from hookrun.run.experiment.metrics.output import OutputReader
from hookrun.run.experiment.metrics.rows import Kind, fits, main_tensor, precise_dtype
from hookrun.run.experiment.observers import Observe, matches, planned
from hookrun.run.experiment.settings import Named, Train

Loss = Callable[[Any, Tensor], Tensor]

WHERE = "train.loss"
NEXT_TOKEN = "next_token"
LOGITS = "bce_with_logits"
ACTIVATION = "activation"


# ---- the losses by name ----------------------------------------------------------------------------------------------


_TAKES: Mapping[Kind, str] = {
    "scores": "it takes scores [batch, classes, ...] of two or more classes, and labels [batch, ...]",
    "tokens": "it takes scores [batch, length, vocabulary] and next tokens [batch, length]",
    "values": "output and target of a sample need as many elements, in the same order",
}


@dataclass(frozen=True, eq=False)
class TorchLoss:
    """A function of torch as a loss, which compares a tensor of the model's output with targets.

    kind: `scores`: class scores [B, classes, ...] with labels [B, ...], or with probabilities [B, classes, ...];
          `tokens`: scores [B, length, vocabulary] with the next token at each position [B, length];
          `values`: elements with targets that have as many, which are reshaped to the output's shape
    args: arguments of the function
    """

    name: str
    function: Callable[..., Tensor]
    kind: Kind
    args: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions. HookrunError if the output does not fit the targets."""
        scores = main_tensor(output)
        shape = list(scores.shape)
        where = f"{WHERE}={self.name}"
        if not fits(scores, target, self.kind):
            dtype = str(target.dtype).removeprefix("torch.")
            raise HookrunError(
                f"{where}: the model returned shape {shape} for targets of shape {list(target.shape)} {dtype}, and "
                f"{_TAKES[self.kind]}"
            )
        if self.kind == "values":
            target = target.to(scores.dtype).reshape(scores.shape)
        elif not target.is_floating_point():
            target = target.long()
        try:
            return self.function(scores, target, **placed(self.args, output, target))
        except IndexError as error:  # a label beyond the scores; torch does not say how many scores there are
            classes = shape[-1 if self.kind == "tokens" or len(shape) == 1 else 1]
            lowest, highest = target[target != self.ignored].aminmax()
            raise HookrunError(
                f"{where}: the labels of this batch go from {lowest} to {highest}, and the model returned shape "
                f"{shape}, scores of the labels 0 to {classes - 1}; give the model as many classes as the data has, "
                "such as model.args.num_classes"
            ) from error
        except (RuntimeError, ValueError, TypeError) as error:
            if not self.args:
                raise
            raise HookrunError(
                f"{where} with {', '.join(self.args)}: {error}; for an output of shape {shape}, targets of shape "
                f"{list(target.shape)}"
            ) from error

    @property
    def ignored(self) -> int:
        """The target of what is not to be predicted."""
        return int(self.args.get("ignore_index", IGNORED))


def placed(args: Mapping[str, Any], output: Any, target: Tensor) -> dict[str, Any]:
    """The arguments of a loss, with tensors among them moved to the output's device and dtype."""
    if not args:
        return {}
    first = next(tensors(output), target)
    place = first if first.is_floating_point() else first.device
    return {key: value.to(place) if isinstance(value, Tensor) else value for key, value in args.items()}


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


def _loss_of_model(output: Any, target: Tensor) -> Tensor:
    loss = main_tensor(dict(children(output)).get("loss", output))
    if loss.numel() != 1:
        raise HookrunError(
            f"train.loss=output: the model returned shape {list(loss.shape)}, not one number; "
            "a transformers model computes a loss if data.args.labels=true gives it labels"
        )
    return loss.reshape(())


_OF_TORCH = (
    TorchLoss("cross_entropy", F.cross_entropy, "scores"),
    TorchLoss("nll", F.nll_loss, "scores"),
    TorchLoss("mse", F.mse_loss, "values"),
    TorchLoss("l1", F.l1_loss, "values"),
    TorchLoss("smooth_l1", F.smooth_l1_loss, "values"),
    TorchLoss("huber", F.huber_loss, "values"),
    TorchLoss(NEXT_TOKEN, _next_token, "tokens"),
    TorchLoss(LOGITS, F.binary_cross_entropy_with_logits, "values"),
    TorchLoss("bce", F.binary_cross_entropy_with_logits, "values"),  # its former name
)

LOSSES: Mapping[str, Loss] = {
    **{loss.name: loss for loss in _OF_TORCH},
    "output": _loss_of_model,
    "output_mean": lambda output, target: main_tensor(output).mean(),
    "output_sum": lambda output, target: main_tensor(output).sum(),
}
"""`output` is the loss that the model returns; `output_mean` and `output_sum` are computed from any output."""

OF_ANY = ("output_mean", "output_sum")
"""Losses of the main tensor, whatever it is."""

SUMS = frozenset({"output_sum"})
"""Losses that are a sum over the batch; all others are a mean."""

NEED_TARGET = frozenset(loss.name for loss in _OF_TORCH)

OF_VALUES = tuple(loss.name for loss in _OF_TORCH if loss.kind == "values")
"""Losses that compare numbers, for which a predicted class has no meaning."""
OF_LABELS = frozenset(loss.name for loss in _OF_TORCH if loss.kind == "scores")
"""Losses whose targets are labels, or probabilities of classes."""

NEXT_TOKEN_LOSSES = frozenset({"cross_entropy", NEXT_TOKEN})
"""Names that mean the next-token loss if targets are tokens."""

_NOT_OURS = ("size_average", "reduce", "reduction")
"""Arguments of torch's functions that are not accepted: the loss would not be a mean over the batch."""

_TENSORS = ("weight", "pos_weight")
"""Arguments of losses whose lists of numbers are converted to tensors."""


def _wrong_arguments(loss: Loss, name: str, args: Mapping[str, Any]) -> list[Problem]:
    """A problem for each argument that one of hookrun's losses does not take, or whose value it refuses."""
    if not isinstance(loss, TorchLoss):
        return unknown_arguments(args, (), WHERE, name)
    allowed = [key for key in list(parameters(loss.function) or {})[2:] if key not in _NOT_OURS]
    problems = unknown_arguments(args, allowed, WHERE, name)
    if problems:
        return problems
    classes = max((value.numel() for value in args.values() if isinstance(value, Tensor)), default=3)
    output = torch.full((2, 1, classes) if loss.kind == "tokens" else (2, classes), 0.5)
    target = output if loss.kind == "values" else torch.zeros(output.shape[:-1], dtype=torch.int64)
    for key, value in args.items():
        try:
            loss.function(output, target, **{key: value})
        except Exception as error:  # torch's functions raise many types for wrong arguments
            what = f"found {value!r}, which '{name}' refuses: {reason(error)}"
            problems.append(Problem(f"{WHERE}.{key}", what, "correct the value"))
    return problems


# ---- the loss `activation`, for inputs or biases that are trained to raise it ---------------------------------------


class ActivationKeys(Section):
    """The arguments of the loss.

    module:   the path of the module
    index:    the part of its first tensor, as a hook's `index`; null: all of it
    maximize: whether training raises the mean instead of lowering it
    """

    module: str
    index: AnyIndex | None = None
    maximize: bool = False


class ActivationLoss:
    """The mean of a module's output in the last forward, after the experiment's hooks; its negative to maximize it.

    watching: the installation that reads the output; the loss is computed within it
    """

    def __init__(self, args: Mapping[str, Any], where: str) -> None:
        self.keys = validated(ActivationKeys, args, where)
        self._where = where
        self._part = None if self.keys.index is None else Part(self.keys.index)
        self._seen: Tensor | None = None

    def problems(self, model: nn.Module) -> list[Problem]:
        """A problem if the model has no such module."""
        module = self.keys.module
        paths = [path for path, _ in model.named_modules()]
        if module in paths:
            return []
        hint = nearest(module, paths)
        return [Problem(f"{self._where}.module", f"the model has no module {module!r}", hint)]

    def watching(self, model: nn.Module) -> Installation:
        """An installation within which the loss sees the module's outputs."""
        module = matches(model, [self.keys.module])
        hook = planned("activation", FORWARD, module, Observe(see=self._see))
        return Installation(ResolvedPlan("", (hook,)), model)

    def _see(self, site: HookSite, value: Any) -> None:
        self._seen = next(tensors(value), None)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions. HookrunError if the module did not run."""
        seen = self._seen
        self._seen = None
        if seen is None or not seen.is_floating_point():
            raise HookrunError(
                f"{self._where}=activation: {self.keys.module} returned no floating-point tensor"
            )
        try:
            part = seen if self._part is None else self._part.of(seen)
            mean = part.mean()
        except (IndexError, ValueError) as error:
            raise HookrunError(f"{self._where}.index: {error}") from error
        return -mean if self.keys.maximize else mean


class ClassKeys(Section):
    """`class_dim`: the dimension of the class scores, 1 or the last one, -1; None: the one that fits."""

    class_dim: Literal[1, -1] | None = None


# ---- the loss of an experiment -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainLoss:
    """A loss that can be computed.

    code:   the code of a user's own loss; None for one of hookrun's
    sums:   it is the sum over a batch; otherwise the mean
    module: the module that computes it; None: a function does
    reader: finds in the model's output what it computes the loss from
    """

    name: str
    function: Loss
    code: Code | None = None
    sums: bool = False
    module: nn.Module | None = None
    reader: OutputReader = field(default_factory=OutputReader)

    @property
    def ignored(self) -> int | None:
        """The label that does not count in its mean over labels; None: it is not a mean over labels."""
        if not isinstance(self.function, TorchLoss) or self.function.kind != "scores":
            return None
        return self.function.ignored

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions."""
        output = self.reader.named(output)
        if isinstance(self.function, TorchLoss):
            output = self.reader.read(output, target, self.function.kind)
        return self.function(output, target)


def loss_of(train: Train, info: DataInfo | None) -> Named | None:
    """The loss that `train.loss` names. Without it cross-entropy if the targets are integers; else None."""
    if train.loss is not None or info is None or info.target is None or info.target.dtype.is_floating_point:
        return train.loss
    return Named(name="cross_entropy")


def _no_loss(output: Any, target: Tensor) -> Tensor:
    raise HookrunError(f"{WHERE}: is not given")


def load_loss(named: Named | None, reader: OutputReader | None = None, *, tokens: bool = False) -> TrainLoss:
    """The loss that `train.loss` names, with checked arguments.

    named:  None: no loss; it is an error to compute it
    tokens: targets are the next token of each position; then cross_entropy means `next_token`

    Raises SpecError for an unknown name, for code that is not trusted, and for arguments that the loss does not take.
    """
    reader = reader or OutputReader()
    if named is None:
        return TrainLoss("", _no_loss, reader=reader)
    name = named.name
    if tokens and name == "cross_entropy":
        name = NEXT_TOKEN
    args = {key: _as_tensor(key, value) for key, value in named.args.items()}
    if name in ("cross_entropy", "nll") and "class_dim" in args:
        reader.class_dim = validated(ClassKeys, {"class_dim": args.pop("class_dim")}, WHERE).class_dim
    if tokens and name in NEED_TARGET and name != NEXT_TOKEN:
        raise spec_error(
            WHERE,
            f"{name!r} does not compare scores with the next token of each position, the target of the data",
            f"use {NEXT_TOKEN}, or output if the model computes its own loss",
        )
    if name == ACTIVATION:
        return TrainLoss(name, ActivationLoss(args, WHERE), reader=reader)
    if name in LOSSES:
        loss = LOSSES[name]
        if args:
            refuse(_wrong_arguments(loss, name, args))
        if isinstance(loss, TorchLoss):
            loss = replace(loss, args=args)
        return TrainLoss(name, loss, sums=name in SUMS, reader=reader)
    trusted = load(name, KIND, f"{WHERE}.name" if args else WHERE)
    function = UserFunction.of(trusted, args, WHERE)
    module = function.call if isinstance(function.call, nn.Module) else None
    return TrainLoss(trusted.name, function.loss, trusted.code, module=module, reader=reader)


def _as_tensor(key: str, value: Any) -> Any:
    """Class weights as a tensor; other values as they are. Raises SpecError if the list has a non-number."""
    if key not in _TENSORS or not isinstance(value, list | tuple):
        return value
    try:
        return torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise spec_error(f"{WHERE}.{key}", f"found {value!r}, expected a list of numbers") from error


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A user's own loss or metric, called with output and targets; its errors name it.

    call: the function; for a class, an object of it
    args: further arguments of the function
    """

    trusted: Trusted
    where: str
    call: Callable[..., Any]
    args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trusted: Trusted, args: Mapping[str, Any], where: str) -> Self:
        """The function with these arguments. Raises SpecError if it cannot be called or constructed with them."""
        target: Any = trusted.target
        is_class = isinstance(target, type)
        refuse(wrong_call(target, args, where, trusted.text, first=0 if is_class else 2))
        if not is_class:
            return cls(trusted, where, target, args)
        with trusted.refused(where), torch.random.fork_rng(devices=[]):
            made = trusted(**args)
        if not callable(made):
            raise spec_error(
                where,
                f"'{trusted.text}' is a class whose objects cannot be called",
                "give it a method __call__, or `forward` of a torch.nn.Module",
            )
        call = made.forward if isinstance(made, nn.Module) else made
        refuse(wrong_call(call, (), where, trusted.text, first=2))
        return cls(trusted, where, made)

    def _value(self, output: Any, target: Tensor) -> Any:
        """What the function returns. Raises HookrunError if it fails."""
        try:
            return self.call(output, target, **placed(self.args, output, target))
        except HookrunError:
            raise
        except Exception as error:
            raise HookrunError(f"{self.where}: {self.trusted.failure(error)}") from error

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch, a tensor without dimensions. HookrunError if the function does not return one."""
        loss = self._value(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise self._wrong(loss, "expected one floating-point number as a tensor")
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(output))
        if learns and not loss.requires_grad:
            raise self._wrong(
                loss,
                "a loss that requires no gradient: do not detach it or create a new tensor from its value",
            )
        return loss.reshape(())

    def values(self, output: Any, target: Tensor) -> Tensor:
        """The metric of a batch: one for each row [n], or one for the batch, without dimensions.

        Raises HookrunError if the function returns anything else.
        """
        returned = self._value(output, target)
        value = _as_numbers(returned)
        if value is not None:
            if value.dim() and value.numel() == len(target):
                return value.reshape(-1)
            if value.numel() == 1:
                return value.reshape(())
        raise self._wrong(
            returned,
            f"expected one number, the mean over the batch, or one for each of the {len(target)} samples",
        )

    def _wrong(self, value: Any, expected: str) -> HookrunError:
        is_tensor = isinstance(value, Tensor)
        shown = f"a tensor of shape {list(value.shape)} {value.dtype}" if is_tensor else repr(value)
        return HookrunError(f"{self.where}: '{self.trusted.text}' returned {shown[:200]}, {expected}")


def score_function(name: str, where: str) -> Callable[[Any, Tensor], Tensor]:
    """A user's function (output, target) -> score. Raises SpecError if it is not trusted or cannot be called so."""
    return UserFunction.of(load(name, METRICS, where), {}, where).loss


def _as_numbers(value: Any) -> Tensor | None:
    """A number, or a tensor, array or list of real numbers, as a tensor in float64; None for anything else."""
    try:
        numbers = torch.as_tensor(value)
    except (RuntimeError, ValueError, TypeError):
        return None
    if numbers.is_complex():
        return None
    return numbers.to(precise_dtype(numbers))

"""What the trial run shows of the model's output: which loss and metrics fit it, and what the plan says of them."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.data import DataInfo
from hookrun.engine.runtime.rng import generators_kept
from hookrun.engine.values.containers import describe, members, rebuild, tensors
from hookrun.engine.values.index import Key, Target, path_text
from hookrun.engine.values.tensors import computable
from hookrun.errors import HookrunError, Mistakes, listed, reason
from hookrun.run.experiment.metrics.losses import ACTIVATION, OF_ANY, OF_VALUES, TorchLoss, TrainLoss
from hookrun.run.experiment.metrics.losses import WHERE as TRAIN_LOSS
from hookrun.run.experiment.metrics.metrics import DEFAULT, LOSS, METRICS, WHERE, Metric
from hookrun.run.experiment.metrics.output import WHERE as TRAIN_OUTPUT
from hookrun.run.experiment.metrics.output import Place, at, named_tensors
from hookrun.run.experiment.metrics.rows import BatchRows, Kind, RowPart, main_tensor, of_samples, of_tokens

MOST_NUMBERS = 2**24
"""The largest output for which numbers are made; of a larger one only the shapes are checked."""
_PROBABILITIES = {
    "SoftmaxBackward0": "softmax",
    "SigmoidBackward0": "sigmoid",
    "HardsigmoidBackward0": "hardsigmoid",
}
"""The names of autograd's nodes for operations that make probabilities."""
_RESHAPING = (
    "BackwardHook",
    "Clone",
    "Permute",
    "Reshape",
    "Squeeze",
    "Transpose",
    "Unsafe",
    "Unsqueeze",
    "View",
)
"""How the names of those begin that do not change numbers."""


@dataclass(eq=False)
class SeenOutput:
    """The output of the trial run, as far as loss and metrics need it.

    device:   of the run; meta: the output is large, and only its shapes are checked
    learns:   gradients of the loss are computed
    is_known: the model ran
    samples:  of the batch
    output:   in its containers, random numbers of its shapes and dtypes
    made_by:  path of a tensor -> the operation that has made probabilities of its numbers
    """

    device: torch.device | str
    learns: bool = True
    is_known: bool = False
    samples: int = 2
    output: Any = None
    made_by: dict[tuple[Key, ...], str] = field(default_factory=dict)

    def see(self, samples: int, output: Any) -> None:
        """Take note of the output for a batch of so many samples."""
        self.is_known = True
        self.samples = samples
        self.made_by = {keys: _made_by(tensor) for keys, tensor in named_tensors(output)}
        if sum(tensor.numel() for tensor in tensors(output)) > MOST_NUMBERS:
            self.device = "meta"
        with unset_fake_temporarily():
            self.output = rebuild(output, lambda leaf: _numbers_like(leaf, self.device, learns=self.learns))


def _numbers_like(leaf: Any, device: torch.device | str, classes: int = 2, *, learns: bool = False) -> Any:
    """Numbers of the shape and dtype of a tensor: in 0..1, or integers below `classes`; anything else as it is."""
    if not isinstance(leaf, Tensor) or leaf.is_nested:
        return leaf
    if not leaf.is_floating_point():
        numbers = torch.arange(leaf.numel(), device="cpu") % classes
        return numbers.reshape(leaf.shape).to(device, leaf.dtype)
    if device == "meta":
        return torch.empty_like(leaf, device=device)
    numbers = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return numbers.to(device, leaf.dtype).requires_grad_(learns and leaf.requires_grad)


def _has_numbers(leaf: Any) -> bool:
    """Whether random numbers stand for it: not for lengths and other integers, nor for objects."""
    if not isinstance(leaf, Tensor):
        return leaf is None
    return leaf.is_floating_point() and not leaf.is_meta and not leaf.is_nested


def _is_of_numbers(error: Exception) -> bool:
    """Whether other numbers might not raise it: a check of values that is not torch's own."""
    cause = error.__cause__ or error
    if not isinstance(cause, ValueError | AssertionError | ArithmeticError):
        return False
    module = ""
    for frame, _ in traceback.walk_tb(cause.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return not module.startswith("torch.")


def _made_by(tensor: Tensor) -> str:
    """The operation that has made probabilities of a tensor's numbers; empty if there is none."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_RESHAPING):
        node = node.next_functions[0][0]
    return "" if node is None else _PROBABILITIES.get(node.name(), "")


@dataclass(eq=False)
class Fit(Mistakes):
    """Computes loss and metrics of the output that the trial run has seen.

    loss:     the loss of `train.loss`, or by default
    metrics:  those of the task; after `check` those that are computed
    is_given: `train.loss` is given
    needed:   the task needs the loss
    lines:    what the plan says of loss and metrics
    notes:    what a user may not expect of them
    """

    seen: SeenOutput
    info: DataInfo
    loss: TrainLoss
    metrics: tuple[Metric, ...]
    is_given: bool
    needed: bool
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        function = self.loss.function
        self._reader = self.loss.reader
        self._path = () if self._reader.path is None else self._reader.path.keys
        self._classes = self.info.vocab_size or self.info.num_classes
        self._target = rebuild(
            self.info.example_target(self.seen.samples),
            lambda leaf: _numbers_like(leaf, self.seen.device, self._classes or 2),
        )
        self._kind: Kind | None = function.kind if isinstance(function, TorchLoss) else None

    def check(self) -> None:
        """Find what does not fit, the metrics that are computed, and what the plan says."""
        try:
            if self._reader.path is not None and self.seen.is_known:
                at(self.seen.output, self._reader.path)
        except HookrunError as error:
            self.note(TRAIN_OUTPUT, str(error))
            return
        wrong = self._wrong_loss()
        if wrong is not None and self.needed:
            self.note(TRAIN_LOSS, wrong, self._what_fits())
        if self.metrics is DEFAULT:
            self._choose_default(wrong)
        for number, metric in enumerate(self.metrics):
            where = f"{WHERE}.{number}"
            try:
                misfit = self._wrong_metric(metric, where)
            except HookrunError as error:
                self.note(f"{where}.of", str(error))
                continue
            if misfit is not None:
                self.note(where, misfit, "leave it out, or name another tensor of the output: of")
        if self.problems:
            return
        if self.needed or any(metric.name == LOSS for metric in self.metrics):
            self.lines.append(f"loss: {self._name_of_loss()}")
            self._note_doubts()
        rows: Kind = "rows" if self.info.tokenizer is None else "tokens"
        names: list[str] = []
        for metric in self.metrics:
            reads = "" if metric.per_row is None else self._read(rows, metric.of)
            names.append(f"{metric.name}{reads}")
        if names:
            self.lines.append(f"metrics: {', '.join(names)}")

    def _fitting(self, kind: Kind | None, path: Target | None = None) -> tuple[Place, Tensor] | None:
        """Where the tensor is that fits the targets, and the tensor; None if none does or the output is not known."""
        if kind is None or not self.seen.is_known or self.info.target is None:
            return None
        named = self._reader.named(self.seen.output, path)
        place = self._reader.place(named, self._target, kind)
        return None if place is None else (place, place.of(named))

    def _read(self, kind: Kind | None, path: Target | None = None) -> str:
        """What is read, for the plan: `` of output[1] [2, 10]``."""
        keys = ("output", *(self._path if path is None else path.keys))
        fitting = self._fitting(kind, path)
        if fitting is not None:
            place, tensor = fitting
            dim = ""
            if tensor.dim() > 1 and place.class_dim != 1:
                tensor = tensor.movedim(1, place.class_dim)
                dim = ", classes in the last dimension"
            return f" of {path_text((*keys, *place.keys))} {list(tensor.shape)}{dim}"
        if kind is not None and len(keys) == 1:
            return " of the first tensor that fits, which is not known before the run"
        return f" of {path_text(keys)}"

    # ---- the loss --------------------------------------------------------------------------------------------------

    def _name_of_loss(self) -> str:
        if self.loss.name in OF_ANY and self.seen.is_known:
            named = self._reader.named(self.seen.output)
            read = main_tensor(named)
            keys = next(keys for keys, tensor in named_tensors(named) if tensor is read)
            return f"{self.loss.name} of {path_text(('output', *self._path, *keys))} {list(read.shape)}"
        if self._kind is None and self.loss.code is None:
            return self.loss.name
        return f"{self.loss.name}{self._read(self._kind)}"

    def _wrong_loss(self) -> str | None:
        """Why the loss cannot be computed; None: it can, or that is not known."""
        target = self.info.target
        has = f"the data {self.info.name!r} has no targets"
        if target is not None:
            has = f"the targets are {str(target.dtype).removeprefix('torch.')} {list(self._target.shape)}"
        elif self.info.collated is not None:
            has = f"{has} that are one tensor"
        if not self.loss.name:
            return f"is not given, and {has}"
        if target is None and self._kind is not None:
            return f"{self.loss.name!r} needs targets, and {has}"
        if not self.seen.is_known or self.loss.name == ACTIVATION:
            return None
        wrong = self._failure(self.loss, self.seen.output, self._target, TRAIN_LOSS)
        beyond = self._scores_beyond()
        is_embedding = self._kind == "scores" and beyond > 0 and not self.needed and not self.is_given
        if wrong is None and (beyond < 0 or is_embedding):
            wrong = f"{self._name_of_loss()} does not have the {self._classes} classes of the data"
        if wrong is None or self.is_given:
            return wrong
        return f"is not given, {has}, and {wrong}"

    def _scores_beyond(self) -> int:
        """How many more scores the tensor of the loss has than the data has classes; 0 if that is not known."""
        if self._classes is None or self._kind not in ("scores", "tokens"):
            return 0
        fitting = self._fitting(self._kind)
        if fitting is None:
            return 0
        _, scores = fitting
        return scores.shape[1 if self._kind == "scores" else -1] - self._classes

    def _failure(
        self, function: Callable[[Any, Any], Any], output: Any, target: Any, where: str
    ) -> str | None:
        """How a function of output and targets fails; None: it does not, or a user's own may want other numbers."""
        is_own = where != TRAIN_LOSS or self.loss.code is not None
        with suppress(Exception):  # what cannot be copied is used itself
            function = copy.deepcopy(function)
        try:
            with generators_kept():
                function(output, target)
        except Exception as error:  # torch's functions raise many types
            if is_own and (_is_of_numbers(error) or not all(map(_has_numbers, members(output)))):
                return None
            text = str(error) if isinstance(error, HookrunError) else reason(error)
            return text.removeprefix(f"{where}=").removeprefix(f"{where}: ")
        return None

    def _what_fits(self) -> str:
        """The next step: the names of the losses that fit output and targets; empty for a user's own loss."""
        if self.loss.code is not None:
            return ""
        if self._scores_beyond() < 0:
            return "give the model as many classes as the data has, such as model.args.num_classes"
        if self.info.target is None:
            return "use output, output_mean, output_sum or a function of your own, or name a target"
        fitting: list[str] = []
        if not self.seen.is_known or self._fitting("values") is not None:
            fitting += OF_VALUES[:-1]
        if self._fitting("scores") is not None:
            fitting.append("cross_entropy")
        if not fitting and self.info.target.dtype.is_floating_point:
            return "use a function of your own, or integers if these are labels of classes"
        return f"use {listed([*fitting, 'a function of your own'], 9)}"

    def _note_doubts(self) -> None:
        """Note what may be meant otherwise, and scores that are probabilities already."""
        fitting = self._fitting(self._kind)
        if fitting is None:
            return
        place, scores = fitting
        text = f"{TRAIN_LOSS}: {self._name_of_loss()}"
        if place.others:
            other = place.others[0]
            self.notes.append(
                f"{text}: {listed(place.others)} would fit too; train.output: {other!r} takes it"
            )
        if self._kind == "scores":
            if scores.dim() > 2 and len(self._reader.class_dims(scores, self._target)) > 1:
                self.notes.append(
                    f"{text}: the last dimension may have the classes too; class_dim: -1 takes it"
                )
            beyond = self._scores_beyond()
            if beyond > 0:
                self.notes.append(f"{text}: these are {beyond} scores more than the data has classes")
        made_by = self.seen.made_by.get((*self._path, *place.keys))
        if made_by and (self._kind != "values" or self.loss.name.startswith("bce")):
            takes = "log-probabilities" if self.loss.name == "nll" else "the numbers before it"
            self.notes.append(f"{text}: these come from a {made_by}, and this loss takes {takes}")

    # ---- the metrics -----------------------------------------------------------------------------------------------

    def _choose_default(self, wrong: str | None) -> None:
        """Loss and accuracy, as far as they fit the targets."""
        target = self.info.target
        has_labels = target is not None and not target.dtype.is_floating_point
        if wrong is not None:
            self.metrics = ()
            self.lines.append(f"metrics: none, since {TRAIN_LOSS} {wrong}; task.metrics names some")
        elif not has_labels or self.loss.name in OF_VALUES or self._wrong_metric(METRICS["accuracy"]):
            self.metrics = (METRICS[LOSS],)

    def _wrong_metric(self, metric: Metric, where: str = WHERE) -> str | None:
        """Why a metric cannot be computed; None: it can, or that is not known. HookrunError if `of` is not there."""
        if not self.seen.is_known or self.info.target is None or metric.name == LOSS:
            return None
        if self.info.tokenizer is not None and self.seen.device == "meta":
            return None  # tokens cannot be chosen without numbers
        output = self.seen.output
        target = self._target
        named = self._reader.named(output) if metric.of is None else at(output, metric.of)
        rows: BatchRows | None
        if self.info.tokenizer is None:
            targets = target if target.dim() else target[None]
            rows = of_samples(named, targets, target, self._reader.scores)
        else:
            rows = of_tokens(named, target, torch.ones_like(target) > 0, torch.zeros_like(target))
        if rows is not None and metric.of_batch is not None:
            return self._failure(metric.of_batch, *rows.whole(), where)
        if rows is not None and rows.scores is not None and metric.per_row is not None:
            scores = computable(rows.scores)
            answers = torch.zeros_like(rows.targets, dtype=torch.int64)
            if metric.per_row(RowPart(scores, rows.targets, answers, answers, scores)) is not None:
                return None
        seen = f"the model returned {describe(named)} for targets {list(target.shape)} {target.dtype}"
        return f"{metric.name!r} needs {metric.needs}, and {seen}"

"""Builds what an experiment names (device, data, model, weights, loss, metrics) and collects the mistakes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.data.samples import IGNORED
from hookrun.errors import CompileError, Problem, Refusal, SpecError
from hookrun.models.arguments import unfit_tokens
from hookrun.runtime.tokens.calls import DECODER_IDS, DECODER_MASK, parameters_of
from hookrun.spec import Settings
from hookrun.tasks.base import JobCache, metrics_of, model_key
from hookrun.tasks.metrics.losses import TrainLoss, load_loss
from hookrun.tasks.metrics.metrics import Metric, load_metrics
from hookrun.tasks.run.session import device_named, session

EXAMPLE_BATCH = 2  # batch norm needs more than one sample in training mode
_SOME_SHAPE = (3, 64, 64)
_SOME_CLASSES = 10
_SOME_TOKENS = 256

T = TypeVar("T")


class Mistakes:
    """The mistakes in what a configuration names, collected so that all of them are reported together.

    problems: the mistakes found so far
    notes:    what could not be checked because of them
    """

    def __init__(self) -> None:
        self.problems = list[Problem]()
        self.notes = list[str]()
        self._of_hooks_only = True

    def add(self, problems: Iterable[Problem], *, of_hooks: bool = False) -> None:
        """Add problems.

        of_hooks: they are of hooks that do not fit the model
        """
        before = len(self.problems)
        self.problems += problems
        if len(self.problems) > before:
            self._of_hooks_only &= of_hooks

    def collected(self, make: Callable[[], T]) -> T | None:
        """The result of `make`. If it raises SpecError or CompileError, None, and its mistakes are added."""
        try:
            return make()
        except Refusal as error:
            self.add(error.errors, of_hooks=isinstance(error, CompileError))
            return None

    def refuse(self) -> None:
        """Raise SpecError if there are mistakes; CompileError if only hooks do not fit the model."""
        if self.problems:
            problems = list(dict.fromkeys(self.problems))
            raise (CompileError if self._of_hooks_only else SpecError)(problems, self.notes)


@dataclass(frozen=True)
class Components:
    """The objects that the settings name; None where their settings are not valid.

    weights:  the source of the model's weights: `random`, the name of published weights, or a path
    leftover: tensors of the weights file that the model does not have: parameters that hooks will add
    applied:  the identities of the hooks that had changed the model when the weights file was written
    loss:     the loss of `train.loss`
    metrics:  the metrics of `task.metrics`
    trust:    names of the packages whose code the experiment may use
    """

    data: DataInfo | None
    model: nn.Module | None
    device: torch.device | None
    weights: str
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]
    loss: TrainLoss | None
    metrics: tuple[Metric, ...] | None
    trust: frozenset[str]


def components(
    settings: Settings,
    split: Split,
    trust: frozenset[str],
    mistakes: Mistakes,
    cache: JobCache | None = None,
) -> Components:
    """Describe the data, and build the model with its weights. Reads no data; mistakes are added to `mistakes`.

    split: the split whose samples are the model's inputs
    trust: names of the packages whose code the experiment may use
    cache: has the model of the job that was checked before
    """
    device = mistakes.collected(lambda: device_named(settings.compute.device))
    info = mistakes.collected(lambda: data.describe(settings.data, split))
    of_tokens = info is not None and info.tokenizer is not None
    loss = mistakes.collected(lambda: load_loss(settings.train.loss, tokens=of_tokens))
    metrics = mistakes.collected(lambda: load_metrics(metrics_of(settings.task)))
    if loss is not None and loss.module is not None and device is not None:
        loss.module.to(device)
    model, leftover, applied, problems = _loaded(settings, info, trust, cache)
    mistakes.add(problems)
    if info is not None and model is not None:
        mistakes.add(unfit_tokens(model, info.vocab_size, info.length))
    weights = models.origin(settings.model)
    return Components(info, model, device, weights, leftover, applied, loss, metrics, trust)


_Loaded = tuple[nn.Module | None, Mapping[str, Tensor], frozenset[str], list[Problem]]
"""A model with its weights, `leftover` and `applied` as in `Components`, and the mistakes in it."""


def _loaded(
    settings: Settings, info: DataInfo | None, trust: frozenset[str], cache: JobCache | None
) -> _Loaded:
    if cache is None:
        return load_model(settings, info, trust)
    key = model_key(settings)
    if key not in cache.model:
        cache.model.clear()  # frees the last model first: two large models may not fit into memory
        cache.model[key] = load_model(settings, info, trust)
    loaded: _Loaded = cache.model[key]
    return loaded


def load_model(settings: Settings, info: DataInfo | None, trust: frozenset[str]) -> _Loaded:
    """The model with its weights, and the mistakes in both.

    info: None if the data is not valid; then a default sample shape is used, since module names do not depend on it
    """
    mistakes, leftover, applied = Mistakes(), None, frozenset[str]()
    with session(settings.compute, settings.seed):
        model = mistakes.collected(lambda: model_for(settings, info, trust, stands_in=True))
    if model is not None:
        leftover = mistakes.collected(lambda: models.load_weights(model, settings.model))
    if not mistakes.problems:
        applied = models.applied_hooks(settings.model)
    return model, leftover or {}, applied, mistakes.problems


def model_for(
    settings: Settings, info: DataInfo | None, trust: frozenset[str], *, stands_in: bool = False
) -> nn.Module:
    """The model for samples of this kind. Raises SpecError.

    info:      None: the model does not get shape, classes or vocabulary from the data
    stands_in: without `info`, use default values of these
    """
    if info is not None:
        shape = info.inputs.shape if isinstance(info.inputs, data.TensorInfo) else None
        classes, vocabulary, length = info.num_classes, info.vocab_size, info.length
    else:
        shape, classes = (_SOME_SHAPE, _SOME_CLASSES) if stands_in else (None, None)
        vocabulary, length = (_SOME_TOKENS, _SOME_TOKENS) if stands_in else (None, None)
    return models.build(
        settings.model,
        sample_shape=shape,
        num_classes=classes,
        trust=trust,
        vocab_size=vocabulary,
        length=length,
    )


def as_call(batch: Tensor | Mapping[str, Tensor], model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model call for a batch: (positional, keyword); named inputs are keyword arguments.

    An encoder-decoder derives its decoder's input from `labels`, shifted by one position. A mask of the padding in it
    is added if the batch does not have one.
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    named = dict(batch)
    makes_tokens = "labels" in named and DECODER_IDS not in named and DECODER_MASK not in named
    if makes_tokens and {DECODER_IDS, DECODER_MASK} <= parameters_of(model).keys():
        named[DECODER_MASK] = (named["labels"] != IGNORED).to(named["labels"].dtype)
    return (), named

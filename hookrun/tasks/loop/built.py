"""Builds what an experiment names (device, data, model, weights, loss, metrics) and collects the mistakes in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.data.samples import IGNORED
from hookrun.errors import Problem, SpecError
from hookrun.models.arguments import unfit_tokens
from hookrun.models.weights import is_path
from hookrun.proving import Example, Plan, compile_plan, misfits
from hookrun.proving import Score as OutputScore
from hookrun.root_keys import ROOT_KEYS
from hookrun.run_values import FoundRuns, UsedBy
from hookrun.runtime.tokens.calls import DECODER_IDS, DECODER_MASK, parameters_of
from hookrun.spec import Experiment, Settings, Spec
from hookrun.spec.remains import beyond
from hookrun.tasks.base import metrics_of
from hookrun.tasks.loop.losses import TrainLoss, load_loss
from hookrun.tasks.loop.metrics import Metric, load_metrics
from hookrun.tasks.loop.session import device_named, session

EXAMPLE_BATCH = 2  # batch norm needs more than one sample in training mode
_SOME_SHAPE = (3, 64, 64)
_SOME_CLASSES = 10
_SOME_TOKENS = 256

T = TypeVar("T")

Score = Callable[[Any, Tensor], Tensor]
"""(output, targets) -> the score from which a backward pass without training starts."""


@dataclass(frozen=True)
class Built:
    """The objects that the settings name.

    weights:  the source of the model's weights: `random`, the name of published weights, or a path
    leftover: tensors of the weights file that the model does not have: parameters that hooks will add
    applied:  the identities of the hooks that had changed the model when the weights file was written
    loss:     the loss of `train.loss`
    metrics:  the metrics of `task.metrics`
    trust:    names of the packages whose code the experiment may use
    """

    data: DataInfo
    model: nn.Module
    device: torch.device
    weights: str
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]
    loss: TrainLoss
    metrics: tuple[Metric, ...]
    trust: frozenset[str]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights; see `Built`.

    problems: the mistakes in the weights, which are then not loaded
    """

    model: nn.Module
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]
    problems: tuple[Problem, ...] = ()


class Maker:
    """Builds the model of a job and compiles its hooks. A sweep uses a subclass that reuses them for similar jobs."""

    def model(self, settings: Settings, info: DataInfo | None, trust: frozenset[str]) -> LoadedModel:
        """The model with its weights. Raises SpecError.

        info: None if the data is invalid; then a default sample shape is used, since module names do not depend on it
        """
        with session(settings.compute, settings.seed):
            model = model_for(settings, info, trust, stands_in=True)
        problems = list[Problem]()
        leftover = collected(problems, lambda: models.load_weights(model, settings.model))
        applied = frozenset[str]() if problems else models.applied_hooks(settings.model)
        return LoadedModel(model, leftover or {}, applied, tuple(problems))

    def plan(
        self,
        hooks: Spec,
        model: nn.Module,
        *,
        used_by: UsedBy,
        example: Example,
        training: bool,
        score: OutputScore | None,
    ) -> Plan:
        """The plan, checked by a trial run with the example.

        score: output -> the score from which a backward pass without training starts; None: no such pass

        Raises CompileError.
        """
        backward = training if score is None else score
        return compile_plan(
            hooks, model, used_by=used_by, example=example, training=training, backward=backward
        )


@dataclass(frozen=True)
class Attempt:
    """The parts of `Built` that could be made, and the mistakes in the others.

    info, made, device, loss, metrics: None if their settings are invalid
    problems:                          all mistakes
    """

    info: DataInfo | None
    made: LoadedModel | None
    device: torch.device | None
    loss: TrainLoss | None
    metrics: tuple[Metric, ...] | None
    trust: frozenset[str]
    problems: list[Problem]

    @property
    def model(self) -> nn.Module | None:
        """The model; None if its settings are invalid."""
        return None if self.made is None else self.made.model

    def built(self, settings: Settings) -> Built:
        """Everything as `Built`. Raises SpecError with all mistakes if there are any."""
        info, made, device, loss, metrics = self.info, self.made, self.device, self.loss, self.metrics
        if info is None or made is None or device is None or loss is None or metrics is None or self.problems:
            raise SpecError(self.problems)
        origin = models.origin(settings.model)
        return Built(
            info,
            made.model,
            device,
            origin,
            made.leftover,
            made.applied,
            loss.to(device),
            metrics,
            self.trust,
        )


def build(settings: Settings, split: Split, trust: frozenset[str]) -> Built:
    """Describe the data, and build the model with its weights. Reads no data.

    split: the split whose samples are the model's inputs
    trust: names of the packages whose code the experiment may use

    Raises SpecError with all mistakes found.
    """
    return attempt(settings, split, trust).built(settings)


def attempt(
    settings: Settings,
    split: Split,
    trust: frozenset[str],
    more: Callable[[DataInfo | None], list[Problem]] = lambda info: [],
    maker: Maker = Maker(),  # noqa: B008 - it has no state
) -> Attempt:
    """As `build`, but mistakes are collected instead of raised.

    more: finds further problems of the settings; its argument is None if the data is invalid
    """
    problems = list[Problem]()
    device = collected(problems, lambda: device_named(settings.compute.device))
    info = collected(problems, lambda: data.describe(settings.data, split))
    loss = collected(problems, lambda: load_loss(settings.train.loss, tokens=_of_tokens(info)))
    metrics = collected(problems, lambda: load_metrics(metrics_of(settings.task)))
    problems += more(info)
    made = collected(problems, lambda: maker.model(settings, info, trust))
    problems += made.problems if made is not None else ()
    if info is not None and made is not None:
        problems += unfit_tokens(made.model, info.vocab_size, info.length)
    return Attempt(info, made, device, loss, metrics, trust, problems)


def refused(
    experiment: Experiment,
    split: Split | None,
    tried: Attempt,
    *,
    example: Example | None,
    training: bool,
    score: Score | None,
) -> SpecError:
    """All mistakes in the configuration, including those of valid hooks that do not fit the model.

    If the data is invalid, the shape of a sample is not known, and only the selectors of hooks are checked.

    example: arguments of a model call; None if the data or the model is invalid
    score:   (output, targets) -> the score from which a backward pass without training starts
    """
    problems, notes = list(tried.problems), list[str]()
    mistaken = _sections(experiment.mistakes)
    has_hooks = bool(experiment.hooks.hooks or experiment.wrong.selections)
    if has_hooks and (tried.model is None or "model" in mistaken):
        notes.append("the hooks were not checked, because the model is not valid")
    elif has_hooks and tried.model is not None:
        info = None if "data" in mistaken else tried.info
        backward: bool | OutputScore = training
        if score is not None and info is not None:
            target = info.example_target(EXAMPLE_BATCH)
            backward = lambda output: score(output, target)  # noqa: E731
        unfit, notes = misfits(
            experiment.hooks,
            experiment.wrong,
            tried.model,
            used_by=UsedBy(experiment.settings, split, FoundRuns(experiment.runs), info),
            example=None if info is None else example,
            training=training,
            backward=backward,
        )
        problems += unfit
        notes += [] if info else ["shapes were not checked, because the data is not valid"]
    return SpecError([*experiment.mistakes, *beyond(problems, experiment.mistakes)], notes)


def _sections(mistakes: Sequence[Problem]) -> set[str]:
    """The sections with mistakes, which may change model and data when corrected; a misspelt section counts too."""
    roots = {each.where.partition(".")[0] for each in mistakes if each.where not in _SHAPELESS}
    meant = [get_close_matches(root, ROOT_KEYS, n=1) for root in roots if root not in ROOT_KEYS]
    return roots.union(*meant)


_SHAPELESS = {"data.batch_size", "data.workers"}
"""Keys of the section `data` that do not affect the shape of a sample."""


def without_download(settings: Settings) -> Settings:
    """The settings without published weights: an experiment that is refused anyway should not download them."""
    if settings.model.own_weights is None or is_path(settings.model.own_weights):
        return settings
    return settings.model_copy(update={"model": settings.model.model_copy(update={"weights": None})})


def collected(problems: list[Problem], make: Callable[[], T]) -> T | None:
    """The result of `make`. If it raises SpecError, None, and its mistakes are added to `problems`."""
    try:
        return make()
    except SpecError as error:
        problems += error.errors
        return None


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


def _of_tokens(info: DataInfo | None) -> bool:
    return info is not None and info.tokenizer is not None


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

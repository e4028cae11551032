"""An experiment with everything that it names: as a draft while it is checked, and prepared to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.data import DataInfo, Split
from hookrun.data.samples import IGNORED, Samples
from hookrun.engine.plan.outside import UsedRun
from hookrun.engine.prove.trial import Plan
from hookrun.engine.runtime.tokens.calls import DECODER_IDS, DECODER_MASK, parameters_of
from hookrun.engine.runtime.wiring import ReplaceOp
from hookrun.errors import Mistakes
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.metrics.losses import TrainLoss
from hookrun.run.experiment.metrics.metrics import Metric
from hookrun.run.experiment.parameter_groups import Trained
from hookrun.run.experiment.task import Ready

EXAMPLE_BATCH = 2  # batch norm needs more than one sample in training mode

Score = Callable[[Any, Tensor, None], Tensor]
"""(output, targets, None) -> the score from which a backward pass without training starts."""


@dataclass(frozen=True)
class Prepared(Ready):
    """An experiment with everything that it names and its compiled plan.

    weights:  the source of the model's weights: `random`, the name of published weights, or a path
    leftover: tensors of the weights file that the model does not have: parameters that hooks will add
    applied:  the identities of the hooks that had changed the model when the weights file was written
    loss:     the loss of `train.loss`
    metrics:  the metrics of `task.metrics`
    trust:    names of the packages whose code the experiment may use
    notes:    notes that are shown with the plan
    trained:  the parameters that the task trains; None if it does not train
    lines:    lines about the task that are shown with the plan
    replace_op: what runs in place of what each hook does, see `Installation`; None: the hook itself
    read:     the samples of the splits that were read before the run, to compare those of several ranks
    """

    trust: frozenset[str]
    data: DataInfo
    model: nn.Module
    device: torch.device
    weights: str
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]
    loss: TrainLoss
    metrics: tuple[Metric, ...]
    plan: Plan
    notes: tuple[str, ...]
    trained: Trained | None = None
    lines: tuple[str, ...] = ()
    replace_op: ReplaceOp | None = None
    read: dict[Split, Samples] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[UsedRun, ...]:
        """The other runs from which hooks take values."""
        return self.plan.runs


@dataclass
class Parts(Mistakes):
    """What an experiment names, as in `Prepared`; None where it is not valid."""

    experiment: Experiment
    trust: frozenset[str]
    data: DataInfo | None = None
    model: nn.Module | None = None
    device: torch.device | None = None
    weights: str = ""
    leftover: Mapping[str, Tensor] = field(default_factory=dict)
    applied: frozenset[str] = frozenset()
    loss: TrainLoss | None = None
    metrics: tuple[Metric, ...] | None = None

    def prepared(self, plan: Plan, notes: Iterable[str], **more: Any) -> Prepared:
        """The prepared experiment, after all mistakes were refused."""
        built = {name: value for name, value in vars(self).items() if name in Prepared.__dataclass_fields__}
        return Prepared(**built, plan=plan, notes=tuple(notes), **more)


def as_call(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model call for the inputs of a batch: (positional, keyword).

    Named inputs, a mapping, are keyword arguments; the members of a tuple are positional ones; anything else, also a
    named tuple or a list, is one argument.

    An encoder-decoder derives its decoder's input from `labels`, shifted by one position. A mask of the padding in it
    is added if the batch does not have one.
    """
    if type(batch) is tuple:
        return batch, {}
    if not isinstance(batch, Mapping):
        return (batch,), {}
    named = dict(batch)
    makes_tokens = "labels" in named and DECODER_IDS not in named and DECODER_MASK not in named
    if makes_tokens and {DECODER_IDS, DECODER_MASK} <= parameters_of(model).keys():
        named[DECODER_MASK] = (named["labels"] != IGNORED).to(named["labels"].dtype)
    return (), named

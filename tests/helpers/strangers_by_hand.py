"""The models in `strangers`: how a command line names each, and what plain PyTorch computes with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from strangers import detector, graphs, masked, sequence
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hookrun

BATCH = 6


@dataclass(frozen=True)
class Stranger:
    """A model, its data, its loss and its metric.

    site:    a module whose output has a row for each sample
    score:   what it is evaluated by, beside the loss
    typed:   further overrides
    metrics: the override of a task that computes loss and score
    collate: the name of the function that makes batches; None: they are stacked
    args:    arguments of the data
    """

    name: str
    module: Any
    site: str
    loss: Callable[[Any, Any], Tensor]
    score: Callable[[Any, Any], Tensor]
    typed: tuple[str, ...] = ()
    metrics: str = "task.metrics=[loss,accuracy]"
    collate: str | None = None
    args: Mapping[str, Any] | None = None

    @property
    def overrides(self) -> list[str]:
        """The command line that names it."""
        package = f"strangers.{self.name}"
        given = [f"+data.args.{key}={value}" for key, value in (self.args or {}).items()]
        collate = [] if self.collate is None else [f"data.collate={package}:{self.collate}"]
        return [
            *(
                "model=python",
                f"model.factory={package}:build",
                "data=python",
                f"data.factory={package}:data",
            ),
            *("compute.device=cpu", "compute.threads=1", f"data.batch_size={BATCH}"),
            *(*given, *collate, *self.typed),
        ]

    def model(self) -> nn.Module:
        """The model with the weights of a run."""
        return hookrun.build(overrides=self.overrides)[0].eval()

    def batches(self, split: str = "val") -> Iterable[tuple[Any, Any]]:
        """The batches of a run without shuffling."""
        data = self.module.data(split, **(self.args or {}))
        collate = None if self.collate is None else getattr(self.module, self.collate)
        return DataLoader(data, batch_size=BATCH, collate_fn=collate)

    @torch.no_grad()
    def plain(self, model: nn.Module) -> dict[str, float]:
        """Loss and score of the split val: means over the samples."""
        loss = score = count = 0.0
        for inputs, target in self.batches():
            output = called(model, inputs)
            loss += float(self.loss(output, target)) * len(target)
            score += float(self.score(output, target)) * len(target)
            count += len(target)
        return {"loss": loss / count, "score": score / count}


def called(model: nn.Module, inputs: Any) -> Any:
    """The output for the inputs of a batch."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def seen_at(stranger: Stranger, path: str) -> list[Any]:
    """What a plain forward hook sees in each batch of val, as it is then."""
    model = stranger.model()
    seen = list[Any]()
    model.get_submodule(path).register_forward_hook(
        lambda module, args, output: seen.append(copy.deepcopy(output))
    )
    with torch.no_grad():
        for inputs, _ in stranger.batches():
            called(model, inputs)
    return seen


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of the samples whose label is found."""
    return (output.argmax(1) == target).float().mean()


SEQUENCE = Stranger("sequence", sequence, "head", F.cross_entropy, accuracy)
DETECTOR = Stranger(
    "detector",
    detector,
    "fine.0",
    detector.loss,
    detector.overlap,
    ("train.loss=strangers.detector:loss",),
    "task.metrics=[loss,'strangers.detector:overlap']",
)
MASKED = Stranger(
    "masked",
    masked,
    "layers.1",
    masked.loss,
    masked.found,
    ("train.loss=strangers.masked:loss",),
    "task.metrics=[loss,'strangers.masked:found']",
)
GRAPHS = Stranger("graphs", graphs, "head", F.cross_entropy, accuracy, collate="collate")

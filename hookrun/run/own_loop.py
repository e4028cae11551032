"""The model and the data of an experiment for a user's own loop: each split as a run reads it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from hookrun import data
from hookrun.data import DataInfo, Split
from hookrun.data.info import SPLITS
from hookrun.engine.trust import read_once
from hookrun.errors import HookrunWarning, NoSuchKey, listed, nearest, spec_error
from hookrun.models.settings import RunWeights
from hookrun.run.experiment.building import build
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.session import on_device
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import task_of
from hookrun.run.passes.batches import Batches
from hookrun.run.tasks.under_hooks import TaskUnderHooks


@dataclass(frozen=True)
class ExperimentData(Mapping[str, Dataset[tuple[Any, torch.Tensor]]]):
    """The splits of an experiment's data: ``data["train"]`` is a dataset of (inputs, target), with transforms applied.

    settings: the experiment's settings: data, seed, batch size, limits
    info:     shapes, dtypes, number of classes, samples in each split
    device:   the device of the model and the batches
    """

    settings: Settings
    info: DataInfo
    device: torch.device

    def __getitem__(self, split: str) -> Dataset[tuple[Any, torch.Tensor]]:
        """Read a split. KeyError if the data has no such split or no samples in it."""
        return data.load(self.settings.data, self._known(split), seed=self.settings.seed)

    def __iter__(self) -> Iterator[str]:
        return (split for split in SPLITS if self.info.sizes[split] != 0)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def loader(self, split: str, *, shuffle: bool | None = None) -> Batches:
        """The batches of a split: order, batch size, sample ids and limits as in a run.

        Each ``for batch in loader`` is one epoch. A batch has `ids`, `inputs`, `target`, `population` and `split`: set
        ``hooks.samples = batch.ids``.

        shuffle: None: `train.shuffle` for training samples, False for validation samples
        """
        known = self._known(split)
        shuffled = (known == "train" and self.settings.train.shuffle) if shuffle is None else shuffle
        return Batches(self, known, shuffle=shuffled)

    def _known(self, split: str) -> Split:
        if split not in tuple(self):
            raise NoSuchKey(f"no split {split!r} in the data {self.info.name!r}: {nearest(str(split), self)}")
        return cast(Split, split)


def parts(experiment: Experiment, trust: frozenset[str]) -> tuple[nn.Module, ExperimentData]:
    """The model with its weights, on its device, and the data, which is not read yet.

    trust: names of the packages whose code the experiment may use

    Raises SpecError with all mistakes; also if the weights hold parameters that only hooks add.
    """
    named = experiment.settings.model.weights
    if isinstance(named, RunWeights) and experiment.runs.get(named.run, "") is None:
        raise spec_error(
            "model.weights.run",
            f"it needs the run of {experiment.settings.needs[named.run]}, which has not been made",
            "run the experiment once on the command line",
        )
    task = task_of(experiment)
    split = task.splits[0] if isinstance(task, TaskUnderHooks) else "train"
    with read_once(trust):
        built = build(experiment, split, trust)
    built.refuse()
    if built.leftover:
        raise spec_error(
            "model.weights",
            f"the file holds {len(built.leftover)} tensors that the model does not have: "
            f"{listed(sorted(built.leftover), 8)}",
            "parameters that hooks added can be loaded only in a run; use weights that were saved without them",
        )
    again = [hook.name for hook in experiment.hooks.hooks if hook.identity in built.applied]
    if again:
        warnings.warn(
            f"model.weights: {listed(again, 8)} had changed the model before its weights were saved: installed again, "
            "they change it again",
            HookrunWarning,
            stacklevel=3,
        )
    assert (
        built.model is not None and built.data is not None and built.device is not None
    )  # or it was refused
    return on_device(built.model, built.device), ExperimentData(
        built.experiment.settings, built.data, built.device
    )

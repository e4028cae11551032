"""Loss and accuracy over batches, weighted by their sizes, read from the device only when asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hookrun.data import DataInfo
from hookrun.spec.experiment import Train
from hookrun.spec.objective import Direction, direction_of
from hookrun.tasks.loop.losses import correct


def measured(train: Train, info: DataInfo, splits: Iterable[str]) -> dict[str, Direction | None]:
    """``split/name`` of the means over each split -> which are better.

    There is an accuracy where the targets are labels and the loss compares the output with them; of a model that
    computes its own loss nobody knows beforehand whether its output holds scores too.
    """
    target = info.target
    has_accuracy = target is not None and not target.dtype.is_floating_point and train.loss != "output"
    names: tuple[str, ...] = ("accuracy", "loss") if has_accuracy else ("loss",)
    return {f"{split}/{name}": direction_of(name) for split in splits for name in names}


class Average:
    """The mean loss and accuracy of the samples seen since the last reset."""

    def __init__(self) -> None:
        self.samples = 0
        self._loss: Tensor | float = 0.0
        self._correct: Tensor | None = None

    def add(self, loss: Tensor, output: Any, target: Tensor) -> None:
        """One batch: its mean loss, the model's output and the targets."""
        size = target.shape[0] if target.dim() else 1
        self.samples += size
        precise = torch.float32 if loss.device.type == "mps" else torch.float64  # which mps does not have
        self._loss = self._loss + loss.detach().to(precise) * size
        right = correct(output, target)
        if right is not None:
            self._correct = right if self._correct is None else self._correct + right

    def read(self) -> dict[str, float]:
        """`loss`, and `accuracy` as a fraction where the targets are labels; nothing where no sample was seen."""
        if not self.samples:
            return {}
        values = {"loss": float(self._loss) / self.samples}
        if self._correct is not None:
            values["accuracy"] = float(self._correct) / self.samples
        return values

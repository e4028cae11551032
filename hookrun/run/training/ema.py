"""train.ema: an exponential moving average of a model's weights, by torch.optim.swa_utils."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hookrun.engine.runtime.sharded import like, own_part, whole_of


class WeightAverage:
    """decay * average + (1 - decay) * weights after each step; the first average is the weights after the first step.

    Parameters and floating-point buffers (a batch norm's running statistics) are averaged as by
    ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)``.
    Other buffers, such as counts, are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._update = get_ema_multi_avg_fn(decay)
        self._averages = dict[str, Tensor]()
        self._weights = dict[str, Tensor]()  # those of the model, while it has the averages

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step of the optimizer."""
        # Averages and weights of the same device and dtype.
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in self._parts():
            average = self._averages.get(name)
            if average is None or average.shape != weight.shape:
                self._averages[name] = weight.detach().clone()
            else:
                averages, weights = alike.setdefault((weight.device, weight.dtype), ([], []))
                averages.append(average)
                weights.append(weight.detach())
        for averages, weights in alike.values():
            self._update(averages, weights, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name; those of sharded parameters are gathered, so every rank has to call it."""
        tensors = dict(self._tensors())
        return {name: whole_of(average, tensors[name]) for name, average in self._averages.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the averages by saved ones."""
        tensors = dict(self._tensors())
        self._averages = {}
        for name, average in state.items():
            tensor = tensors[name]
            self._averages[name] = own_part(like(average.to(tensor.device), tensor))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the averages, or its own weights before a step; restored afterwards."""
        for name, weight in self._parts():
            if name in self._averages:
                self._weights[name] = weight.detach().clone()
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(self._weights)
            self._weights = {}

    @contextmanager
    def swapped_out(self) -> Iterator[None]:
        """Within the block the model has its own weights, even inside of `swapped_in`."""
        self._write(self._weights)
        try:
            yield
        finally:
            if self._weights:
                self._write(self._averages)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._parts():
            if name in values:
                weight.copy_(values[name])

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors to average, by name; of sharded parameters this rank's part."""
        for name, tensor in self._tensors():
            yield name, own_part(tensor)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors to average, read each time, since a module may replace a buffer by another tensor."""
        for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                yield name, tensor

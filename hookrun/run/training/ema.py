"""train.ema: an exponential moving average of a model's weights, by torch.optim.swa_utils."""

from __future__ import annotations

from collections import defaultdict
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
        self._own_weights = dict[str, Tensor]()  # filled while the model has the averages

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step of the optimizer."""
        alike = defaultdict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]](list)
        for name, own in self._own():
            average = self._averages.get(name)
            if average is None or average.shape != own.shape:
                self._averages[name] = own.detach().clone()
            else:
                alike[own.device, own.dtype].append((average, own.detach()))
        for pairs in alike.values():
            averages, weights = map(list, zip(*pairs, strict=True))
            self._update(averages, weights, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name; those of sharded parameters are gathered, so every rank has to call it."""
        there = dict(self._everything())
        return {name: whole_of(average, there[name]) for name, average in self._averages.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the averages by saved ones."""
        there = dict(self._everything())
        self._averages = {
            name: own_part(like(average.to(there[name].device), there[name]))
            for name, average in state.items()
        }

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the averages, or its own weights before a step; restored afterwards."""
        self._own_weights = {
            name: own.detach().clone() for name, own in self._own() if name in self._averages
        }
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(self._own_weights)
            self._own_weights = {}

    @contextmanager
    def swapped_out(self) -> Iterator[None]:
        """Within the block the model has its own weights, even inside of `swapped_in`."""
        self._write(self._own_weights)
        try:
            yield
        finally:
            self._write(self._averages if self._own_weights else {})

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, own in self._own():
            if name in values:
                own.copy_(values[name])

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors to average, by name; of sharded parameters this rank's part."""
        yield from ((name, own_part(each)) for name, each in self._everything())

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors to average, read each time, since a module may replace a buffer by another tensor."""
        for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                yield name, tensor

"""A model for one test: some modules and a function that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Net(nn.Module):
    """A model of the named modules and parameters; its forward is `function(model, *arguments)`."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


POISONED = """
def __init__(self, at=()):
    super().__init__()
    self.at, self.last = at, nn.Linear(64, 10)
    self.early, self.norm, self.drop = nn.BatchNorm1d(64), nn.BatchNorm1d(64), nn.Dropout(0.5)
    self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    self.register_buffer("total", torch.zeros(64))
    self.register_buffer("absent", None)

def forward(self, x):
    bad = self.training and int(self.seen) in self.at
    self.seen += self.training
    x = self.early(x.flatten(1)) * (float("nan") if bad else 1.0)
    if self.training:
        self.total = self.total + x.detach().sum(0)
    return self.last(self.drop(self.norm(x)))
"""
"""The body of a network of one's own: its forwards with the numbers `at` make NaN in training, after `early`.

Its buffers are written in place, replaced by other tensors, or None.
"""

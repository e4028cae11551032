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

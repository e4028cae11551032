"""Points: values within what an action computes, at which other hooks fire. Each is a module that no model has."""

from __future__ import annotations

from typing import Any

from torch import nn


class Point(nn.Module):
    """Returns its argument: hooks on it see that, and change it."""

    def forward(self, value: Any) -> Any:
        """The argument itself."""
        return value


def point_path(path: str, hook: str, name: str) -> str:
    """The path of a point that a hook adds at the module with this path: ``layer4:sae.features``."""
    return f"{path}:{hook}.{name}"

"""Short forms: the spec of one hook, and what a capture keeps of some calls."""

from __future__ import annotations

from typing import Any

from torch import nn

import hookrun


def one_hook(
    select: Any = "", hook: str = "forward", action: str = "capture", **keys: Any
) -> dict[str, dict[str, Any]]:
    """The spec of one hook with the name `h`."""
    return {"h": {"select": select, "hook": hook, "action": action, **keys}}


def captured(model: nn.Module, *inputs: Any, select: str = "", hook: str = "forward", **keys: Any) -> Any:
    """What a capture on one module keeps of a call with each of the inputs."""
    with hookrun.hooked(model, one_hook(select, hook, **keys)) as hooks:
        for value in inputs:
            model(value)
    return hooks.captures["h"][select]

"""Short forms: the spec of one hook, what a capture keeps of some calls, and the same edits with hooks by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import hookrun

EVERY: dict[str, dict[str, Any]] = {
    "pre": {"select": "**", "hook": "forward_pre", "action": "capture", "when": {"call": 0}},
    "out": {"select": "**", "hook": "forward", "action": "noise"},
    "linear": {"select": "type:Linear", "hook": "forward", "action": "linear"},
    "back": {"select": "**", "hook": "backward", "action": "stats"},
    "back_pre": {"select": "**", "hook": "backward_pre", "action": "scale", "factor": 2},
    "of_out": {"select": "**", "hook": "output_grad", "action": "capture"},
    "grad": {"select": "**", "hook": "grad", "action": "clamp", "min": -1, "max": 1},
    "sum": {"select": "**", "hook": "post_accumulate_grad", "action": "check"},
    "saved": {"select": "**", "hook": "saved_tensors", "action": "offload", "to": "cpu"},
    "step": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 1},
    "after": {"select": "**", "hook": "optimizer_step_post", "action": "stats"},
}
"""Every hook type at once."""


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


def register(
    module: Any, kind: str, edit: Callable[[Tensor], Tensor], prepend: bool = False
) -> RemovableHandle:
    """Register an edit by hand as a hook of torch: on the one input or output of a module, or on its weight."""

    def accumulated(parameter: Tensor) -> None:
        parameter.grad = edit(parameter.grad)  # type: ignore[arg-type]

    match kind:
        case "forward_pre":
            return module.register_forward_pre_hook(lambda _m, args: (edit(args[0]),), prepend=prepend)
        case "forward":
            return module.register_forward_hook(lambda _m, _args, output: edit(output), prepend=prepend)
        case "backward_pre":
            return module.register_full_backward_pre_hook(
                lambda _m, grads: (edit(grads[0]),), prepend=prepend
            )
        case "backward":
            return module.register_full_backward_hook(
                lambda _m, grads, _out: (edit(grads[0]),), prepend=prepend
            )
        case "output_grad":
            return module.register_forward_hook(lambda _m, _args, output: output.register_hook(edit) and None)
        case "grad":
            return module.weight.register_hook(edit)
    return module.weight.register_post_accumulate_grad_hook(accumulated)

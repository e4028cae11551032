"""The action `linear`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import OwnName
from hookrun.engine.hook_types import FORWARD, HookType
from hookrun.errors import nearest

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class Linear(Action):
    """Replace the output by a linear map of the module's first argument: x @ weight.T + bias.

    weight: the module's parameter of shape [out, in]
    bias:   the module's parameter of shape [out]; null for no bias

    The parameters are read at each call, so they can be trained, filled, frozen, or added by other hooks.
    """

    action_name = "linear"
    hook_types = frozenset({FORWARD})
    uses = ("args",)
    weight: OwnName = "weight"
    bias: OwnName | None = "bias"

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """The module must have both parameters."""
        for field in ("weight", "bias"):
            name = getattr(self, field)
            if name is not None and name not in parameters:
                hint = "; `bias: null` does without" if field == "bias" else ""
                return f"the module has no parameter {name!r} ({field}): {nearest(name, parameters)}{hint}"
        return None

    def build(self, site: HookSite) -> Edit:
        """A function that ignores the module's output and computes the new one."""
        from torch.nn.functional import linear

        module, weight, bias = site.module, self.weight, self.bias

        def replace(output: Tensor) -> Tensor:
            args = site.args
            if not args:
                raise ValueError(
                    "`linear` multiplies the module's first positional argument, and this call passed none: "
                    "pass the input by position"
                )
            return linear(args[0], getattr(module, weight), None if bias is None else getattr(module, bias))

        return replace

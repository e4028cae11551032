"""The action `clip_norm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import Finite, Number
from hookrun.engine.hook_types import ON_VALUES, SAVED_TENSORS, HookType

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the total norm before it divides


class ClipNorm(Action):
    """Scale tensors down to a common norm of max_norm: x * min(1, max_norm / (norm + 1e-6)).

    max_norm:  the maximum norm; tensors with a smaller norm do not change
    norm_type: the p of the p-norm, by default 2; .inf for the largest absolute value
    per:       the tensors that have one norm, as if they were one vector. all: those of all selected parameters;
               module: those of each module; tensor: each tensor by itself. By default all on optimizer hooks, tensor on
               a single parameter (`weight`, `grad`, `post_accumulate_grad`), module on the value of a module

    Formula and rounding are those of torch.nn.utils.clip_grad_norm_; a NaN in one tensor makes all of them NaN.
    """

    action_name = "clip_norm"
    hook_types = ON_VALUES - {SAVED_TENSORS}
    scope = "together"
    max_norm: Annotated[Finite, Field(gt=0)]
    norm_type: Annotated[
        Number, Field(gt=0), BeforeValidator(lambda raw: math.inf if raw == "inf" else raw)
    ] = 2.0
    per: Literal["all", "module", "tensor"] | None = None

    def carried_by(self, hook_type: HookType) -> str | None:
        """`all` needs a hook that sees all parameters at once, and `module` one that sees more than one."""
        if hook_type.on == "optimizer" or self.per in (None, "tensor", hook_type.on):
            return super().carried_by(hook_type)
        kind = "parameter" if hook_type.on_parameters else "module"
        return (
            f"`per: {self.per}` takes several tensors together, and {hook_type} sees one {kind} at a time: "
            "use optimizer_step_pre, or leave `per` out"
        )

    def said(self, hook_type: HookType) -> Mapping[str, object]:
        """The parameters that a plan shows, always with `per`."""
        default = {"optimizer": "all", "module": "module"}.get(hook_type.on, "tensor")
        return {**super().said(hook_type), "per": self.per or default}

    def together_by(self, path: str) -> str:
        """The module of the parameter if each module has its own norm."""
        return path.rpartition(".")[0] if self.per == "module" else ""

    def build(self, site: HookSite) -> Edit:
        """A function from a list of tensors to a list of scaled ones."""
        import torch
        from torch.linalg import vector_norm

        max_norm = self.max_norm
        order = self.norm_type

        def clip(tensors: list[Tensor]) -> list[Tensor]:
            full = [x for x in tensors if x.numel()]  # an empty tensor has no largest element
            if not full:
                return tensors
            if len(tensors) == 1:
                return [tensors[0] * (max_norm / (vector_norm(tensors[0], order) + EPSILON)).clamp_max(1)]
            norms = torch._foreach_norm(full, order)
            device = norms[0].device
            total = vector_norm(torch.stack([norm.to(device) for norm in norms]), order)
            factor = (max_norm / (total + EPSILON)).clamp_max(1)
            # _foreach_mul by a tensor raises in its backward pass.
            if not factor.requires_grad and len({(x.dtype, x.device) for x in tensors}) == 1:
                return list(torch._foreach_mul(tensors, factor))
            # The factor has the widest dtype of all: a tensor of no dimensions would take it over.
            return [(x * factor.to(x.device)).to(x.dtype) for x in tensors]

        if self.per != "tensor":
            return clip
        return lambda tensors: [clip([tensor])[0] for tensor in tensors]

"""The action `cast`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hookrun.engine.actions.base import Action, Edit, HookSite, Packed
from hookrun.engine.hook_types import SAVED_TENSORS
from hookrun.engine.values.tensors import as_real

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Cast(Action):
    """Store saved tensors in a smaller dtype; the backward pass gets the rounded values.

    dtype: dtype of the stored tensors, for complex ones that of both parts; a tensor whose dtype is not wider is
           stored unchanged
    """

    action_name = "cast"
    hook_types = frozenset({SAVED_TENSORS})
    does = "pack"
    dtype: Literal["float16", "bfloat16", "float32"]

    def build(self, site: HookSite) -> Edit:
        """A function from a saved tensor to its smaller replacement."""
        import torch

        smaller: dtype = getattr(torch, self.dtype)

        def cast(x: Tensor) -> Packed | None:
            real, restored = as_real(x.detach())
            original = real.dtype
            if original.itemsize <= smaller.itemsize:
                return None

            def undo(held: Tensor | None) -> Tensor:
                return restored(held.to(original))  # type: ignore[union-attr]  # the tensor handed over below

            return Packed(real.to(smaller), undo)

        return cast

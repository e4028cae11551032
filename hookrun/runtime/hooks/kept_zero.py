"""Elements of a parameter that stay 0 while the hooks are installed, as the mask of torch.nn.utils.prune keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrun.runtime.hooks.base import ParameterHook
from hookrun.runtime.sharded import HookedParameter, is_sharded, like, own_part


class KeptZero(ParameterHook):
    """The elements of one parameter that stay 0: those of its gradient, and its own after each optimizer step.

    Whatever else writes into the parameter, `load_state_dict` for one, is noticed at the next forward of the model.

    free:      bool, False where the element stays 0
    chosen_by: the names of the hooks that have chosen elements
    """

    def __init__(self, place: HookedParameter) -> None:
        self.place = place
        self.free = torch.ones(place.parameter.shape, dtype=torch.bool)
        self.chosen_by = set[str]()
        self._version = -1

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register a tensor hook: the sum over ranks of gradients with zeros has the same zeros."""
        return parameter.register_hook(self.grad)

    def grad(self, grad: Tensor) -> Tensor:
        """torch's tensor hook."""
        return grad * self._free_part()

    def reduced(self, parameter: nn.Parameter) -> None:
        """The same for a sharded parameter, whose tensor hooks torch never calls."""
        if (grad := parameter.grad) is not None and is_sharded(grad):
            own_part(grad).mul_(self._free_part())

    @property
    def is_changed(self) -> bool:
        """Whether the parameter was written to since it was last set to 0 here."""
        part = own_part(self.place.parameter)
        return part.is_inference() or part._version != self._version

    @torch.no_grad()
    def fill(self) -> None:
        """Set the elements to 0."""
        part = own_part(self.place.parameter)
        part.masked_fill_(~self._free_part(), 0)
        self._version = -1 if part.is_inference() else part._version

    def state_dict(self) -> dict[str, Tensor]:
        """Which elements stay 0, for a resumed run."""
        return {"free": self.free}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the elements of a saved state at 0; they are set to 0 at the next forward."""
        self.free, self._version = state["free"], -1

    def _free_part(self) -> Tensor:
        """`free`, on the parameter's device; of a sharded parameter this rank's part."""
        self.free = self.free.to(self.place.parameter.device)
        return own_part(like(self.free, self.place.parameter))

"""The action `drop_expert`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hookrun.engine.actions.base import Absent, Action, Edit, HookSite
from hookrun.engine.actions.experts import Experts, chosen_experts, count_in, expert_count
from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, HookType
from hookrun.engine.values.index import AnyTarget
from hookrun.engine.values.tensors import computable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class DropExpert(Action):
    """Take experts out of a mixture: the weights of the tokens that have chosen them become 0.

    experts:     their numbers, from 0; one beyond those of the module is refused if it tells how many it has, by an
                 attribute such as `num_experts`, a list of modules or parameters [experts, in, out]
    renormalize: the weights of a token keep their sum; a token that is left with no expert gets 0
    indices:     where the numbers of the chosen experts are, `"[1]"`; null: the only tensor of whole numbers [..., k]
                 beside one of floating-point numbers of the same shape, with fewer than all experts in a row
    weights:     where their weights are; null: that other tensor

    On `forward_pre` of the module that gets both, or on `forward` of a router that returns both. The plan shows which
    tensors they are, and how many experts there are. To drop one that no token chooses changes nothing.
    """

    action_name = "drop_expert"
    hook_types = frozenset({FORWARD_PRE, FORWARD})
    scope = "together"
    experts: Experts
    renormalize: bool = Field(default=True, strict=True)
    indices: AnyTarget | None = None
    weights: AnyTarget | None = None

    @property
    def mixes_rows(self) -> bool:
        """A token's weights depend on that token only."""
        return False

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """The module must have the experts."""
        return self._lacking(expert_count(module))

    def _lacking(self, count: int | None) -> str | None:
        """That one of the experts is not among so many; None: the count is not known, or all are."""
        if count is None or max(self.experts) < count:
            return None
        return f"there is no expert {max(self.experts)}: it has {count}, numbered from 0"

    def count_of(self, key: str, module: Module) -> int | None:
        """How many experts the module has."""
        return expert_count(module) if key == "experts" else None

    def taken(self, value: Any, module: Module) -> Mapping[str, Tensor]:
        """The indices and the weights."""
        indices, weights = chosen_experts(value, module, self.indices, self.weights)
        count = count_in(value, module)
        lacking = self._lacking(count)
        if lacking is not None:
            raise Absent(lacking)
        return {"indices": indices, f"weights of {count or 'an unknown number of'} experts": weights}

    def build(self, site: HookSite) -> Edit:
        """A function [indices, weights], in any order -> the new weights, and None for the indices."""
        import torch

        numbers = site.prepared("experts", lambda numbers: numbers)
        renormalizes = self.renormalize
        is_float = torch.Tensor.is_floating_point

        def drop(taken: Sequence[Tensor]) -> list[Tensor | None]:
            indices, weights = sorted(taken, key=is_float)
            dropped = (indices.unsqueeze(-1) == numbers(indices)).any(-1)
            wide = computable(weights)
            kept = wide.masked_fill(dropped, 0.0)
            if renormalizes:
                left = kept.sum(-1, keepdim=True)
                grows = dropped.any(-1, keepdim=True) & (left != 0)
                factor = wide.sum(-1, keepdim=True) / left.masked_fill(~grows, 1.0)
                kept = torch.where(grows, kept * factor, kept)
            return [kept.to(weights.dtype) if is_float(each) else None for each in taken]

        return drop

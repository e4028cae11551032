"""The action `quantize`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import Count, Finite
from hookrun.engine.values.tensors import computable, require_real

if TYPE_CHECKING:
    from torch import Tensor


class Quantize(Action):
    """Round to 2^bits evenly spaced numbers: (clamp(round(x / scale) + zero) - zero) * scale.

    bits:       1 to 16
    per:        what shares a scale: `tensor`, the whole tensor; `channel`, an index of `dim`; `group`, `group_size`
                elements in a row of the last dimension
    dim:        the dimension of channels, by default 1 of a module's values (0 is the batch), 0 of parameters
    group_size: must divide the last dimension
    symmetric:  around 0, as usual for weights: from -2^(bits-1) to 2^(bits-1) - 1 with zero = 0
    observer:   the range: `minmax`, from the smallest to the largest element, or `percentile`
    percentile: this part of the elements lies below the upper end of the range (nearest rank), as many above the lower

    Scale and zero are those of torch.ao's MinMaxObserver without its least scale, from the finite elements of each
    firing; the range contains 0. Values and gradients are those of torch.fake_quantize_per_channel_affine: straight
    through within the range, 0 for elements outside, which become its ends, infinities too. NaN stays NaN.
    """

    action_name = "quantize"
    bits: Annotated[int, Field(strict=True, ge=1, le=16)] = 8
    per: Literal["tensor", "channel", "group"] = "tensor"
    dim: Annotated[int, Field(strict=True)] | None = None
    group_size: Count | None = None
    symmetric: bool = False
    observer: Literal["minmax", "percentile"] = "minmax"
    percentile: Annotated[Finite, Field(gt=50, le=100)] = 99.9

    @model_validator(mode="after")
    def _goes_together(self) -> Quantize:
        if self.symmetric and self.bits == 1:
            raise ValueError("1 bit has no positive number around 0: use bits: 2 or symmetric: false")
        given = self.model_fields_set
        if "group_size" in given and self.per != "group":
            raise ValueError("`group_size` goes with `per: group`")
        if "dim" in given and self.per != "channel":
            raise ValueError("`dim` goes with `per: channel`")
        if "percentile" in given and self.observer != "percentile":
            raise ValueError("`percentile` goes with `observer: percentile`")
        if self.per == "group" and self.group_size is None:
            raise ValueError("`per: group` needs `group_size`")
        return self

    @property
    def mixes_rows(self) -> bool:
        """Whether rows share a scale."""
        return self.per == "tensor" or (self.per == "channel" and self.dim != 0)

    def build(self, site: HookSite) -> Edit:
        """A function x -> the nearest number of the range to each element."""
        import torch

        size = 2**self.bits
        low_end = -(2 ** (self.bits - 1)) if self.symmetric else 0
        high_end = low_end + size - 1
        limits = torch.finfo(torch.float32)

        def quantize(x: Tensor) -> Tensor:
            require_real(x)
            if not x.numel():
                return x.clone()
            view, over = self._shared(x, site)
            wide = computable(view)
            seen = wide.detach()
            low, high = self._range(seen.nan_to_num(0.0, 0.0, 0.0), over)
            width = 2 * torch.maximum(-low, high) if self.symmetric else high - low
            scale = (width / (size - 1)).float().clamp(limits.tiny, limits.max)
            zero = 0 if self.symmetric else (low_end - (low / scale).round()).clamp(low_end, high_end)
            steps = (seen * scale.reciprocal()).round_().add_(zero)
            new: Tensor = steps.clamp(low_end, high_end)
            inside = wide.where(new == steps, 0.0) if torch.is_grad_enabled() else None
            new.sub_(zero).mul_(scale)
            if inside is not None:
                new = (inside - inside.detach()).add_(new)  # 0, with the gradient of x
            return new.reshape(x.shape).to(x.dtype)

        return quantize

    def _shared(self, x: Tensor, site: HookSite) -> tuple[Tensor, tuple[int, ...]]:
        """The tensor, and the dimensions along which elements share a scale. ValueError if it has no such dimension."""
        dims = x.dim()
        batch = site.hook_type.batch
        if self.per == "tensor":
            return x, tuple(range(dims))
        if self.per == "group":
            if dims < 1 + batch or x.shape[-1] % (self.group_size or 1):
                raise ValueError(
                    f"shape {list(x.shape)} does not have groups of {self.group_size} in its last dimension"
                )
            return x.unflatten(-1, (-1, self.group_size)), (dims,)
        dim = self.dim if self.dim is not None else int(batch)
        if not -dims <= dim < dims:
            raise ValueError(
                f"shape {list(x.shape)} does not have a dimension {dim} of channels: name it with `dim`"
            )
        return x.unsqueeze(-1), tuple(other for other in range(dims + 1) if other != dim % dims)

    def _range(self, seen: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The ends of the range, which contains 0, with size 1 in the dimensions `over`."""
        if self.observer == "minmax":
            low = seen.amin(over, keepdim=True)
            high = seen.amax(over, keepdim=True)
            return low.clamp_max(0), high.clamp_min(0)
        ends = [1 if dim in over else size for dim, size in enumerate(seen.shape)]
        kept = [dim for dim in range(seen.dim()) if dim not in over]
        rows = seen.permute((*kept, *over)).flatten(len(kept))
        count = rows.shape[-1]
        rank = math.ceil(round(self.percentile * count / 100, 6))
        if self.symmetric:
            high = rows.abs().kthvalue(rank).values.view(ends)
            low = -high
        else:
            low = rows.kthvalue(count + 1 - rank).values.view(ends)
            high = rows.kthvalue(rank).values.view(ends)
        return low.clamp_max(0), high.clamp_min(0)

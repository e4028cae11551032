"""The action `capture`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hookrun.actions.base import Action, Site

if TYPE_CHECKING:
    from torch import Tensor

Dimensions = Annotated[
    tuple[Annotated[int, Field(strict=True)], ...],
    BeforeValidator(lambda raw: (raw,) if isinstance(raw, int) else raw),
    Field(min_length=1),
]
Count = Annotated[int, Field(strict=True, ge=1)]


def _named(raw: Any) -> Any:
    """`mean` alone is the mean over all dimensions but the first."""
    return {raw: None} if raw in ("mean", "norm") else raw


class Reduction(BaseModel):
    """One of: `mean` or `norm` over dimensions (all but the first, unless given), `topk`, `project`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    mean: Dimensions | None = None
    norm: Dimensions | None = None
    topk: Count | None = None
    project: Count | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Reduction:
        if len(self.model_fields_set) != 1:
            raise ValueError("give one of mean, norm, topk, project")
        return self

    def __str__(self) -> str:
        (name,) = self.model_fields_set
        given = getattr(self, name)
        return name if given is None else f"{name} {given if isinstance(given, int) else list(given)}"


class Capture(Action):
    """Keep the value as it is at that moment, detached, its containers included.

    dtype:  of what is kept of floating-point tensors; their own unless given
    device: where it is kept in memory; its own device unless given
    reduce: keep less of each tensor. `{mean: [2, 3]}` and `{norm: [1]}` are over these dimensions, all but the first
            unless given; `{topk: 5}` the largest elements of the last dimension, in falling order; `{project: 64}` a
            fixed random projection of each row's elements to so many (Gaussian, scaled to keep lengths on average:
            Johnson and Lindenstrauss), the same for every row, call and run of the hook
    max_bytes: of all that the hook keeps, at all its modules; what would go beyond is not kept, which is said once
    """

    action_name = "capture"
    observes = True
    scope = "value"
    dtype: Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = None
    device: Literal["cpu"] | None = None
    reduce: Annotated[Reduction, BeforeValidator(_named)] | None = None
    max_bytes: Count | None = None

    def build(self, site: Site) -> Callable[[Any], Any]:
        """Store every value that comes by."""
        keep = site.keep()
        changes = [*self._reductions(site), *self._conversions()]
        if not changes:
            return keep
        import torch

        rebuild = site.rebuild

        def changed(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                return leaf
            return reduce(lambda tensor, change: change(tensor), changes, leaf.detach())

        def capture(value: Any) -> None:
            with torch.no_grad():
                keep(rebuild(value, changed))

        return capture

    def _reductions(self, site: Site) -> list[Callable[[Tensor], Tensor]]:
        if self.reduce is None:
            return []
        import torch

        dims, count = self.reduce.mean or self.reduce.norm, self.reduce.topk
        if count is not None:
            return [lambda x: x.topk(min(count, x.shape[-1])).values]
        if self.reduce.project is not None:
            return [_Projection(self.reduce.project, site)]
        over = torch.mean if "mean" in self.reduce.model_fields_set else torch.linalg.vector_norm
        return [lambda x: over(x, dim=dims or tuple(range(1, x.dim()))) if dims or x.dim() > 1 else x]

    def _conversions(self) -> list[Callable[[Tensor], Tensor]]:
        import torch

        if self.device is None and self.dtype is None:
            return []
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return [lambda x: x.to(device=self.device or x.device, dtype=dtype or x.dtype)]


class _Projection:
    """x [rows, ...] -> [rows, width]: by a matrix that depends on the hook and the number of elements alone."""

    def __init__(self, width: int, site: Site) -> None:
        self._width = width
        self._seed = site.seed
        self._matrices: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        import torch

        flat = x.flatten(1) if x.dim() > 1 else x.reshape(1, -1)
        key = (flat.shape[1], flat.dtype, flat.device)
        if (matrix := self._matrices.get(key)) is None:
            generator = torch.Generator().manual_seed(self._seed)
            drawn = torch.randn(flat.shape[1], self._width, generator=generator) / math.sqrt(self._width)
            matrix = self._matrices[key] = drawn.to(dtype=flat.dtype, device=flat.device)
        return flat @ matrix

"""The action `project`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.values import InlineFunction, OutsideValue, Ramp, Value, is_by_sample
from hookrun.engine.values.tensors import (
    broadcast_error,
    check_broadcast,
    computable,
    holds_data,
    require_real,
)

if TYPE_CHECKING:
    from torch import Tensor


class Project(Action):
    """Remove a direction or subspace of the last dimension: x - (x·v) v with |v| = 1; or keep it alone.

    direction: a vector of any length but 0, as long as the last dimension; with more dimensions it broadcasts to the
               tensor's shape, a vector for each position or, by `sample: same`, for each sample
    subspace:  [k, D]: k vectors that span it; they are made orthonormal
    remove:    false keeps (x·v) v, the part in the direction or subspace, instead of the rest

    Computed in float32, for float64 tensors in float64.
    """

    action_name = "project"
    direction: Value | None = None
    subspace: Value | None = None
    remove: bool = True

    @model_validator(mode="after")
    def _is_one_list(self) -> Project:
        given = [value for value in (self.direction, self.subspace) if value is not None]
        if len(given) != 1:
            raise ValueError("give direction or subspace")
        if isinstance(given[0], float | Ramp):
            raise ValueError(f"found the number {given[0]}, expected a list with a number for each element")
        if isinstance(self.subspace, InlineFunction) or (
            isinstance(self.subspace, OutsideValue) and (is_by_sample(self.subspace) or self.subspace.at)
        ):
            raise ValueError(
                "subspace is one for all samples and positions: a list, a file or the mean of a run"
            )
        return self

    def build(self, site: HookSite) -> Edit:
        """A function x [..., D] -> the rest of x, or its part in the direction or subspace."""
        import torch

        is_line, removes = self.subspace is None, self.remove
        vectors = site.prepared("direction", _unit) if is_line else site.prepared("subspace", _basis)

        def project(x: Tensor) -> Tensor:
            require_real(x)
            wide = computable(x)
            v = vectors(wide).to(wide.dtype)
            if x.shape[-1:] != v.shape[-1:]:
                raise ValueError(broadcast_error(v.shape[-1:], x.shape))
            if is_line:
                check_broadcast(v, x)
                part = (wide * v).sum(-1, keepdim=True) * v
            else:
                with torch.autocast(x.device.type, enabled=False):
                    part = wide @ v.mT @ v
            return (wide - part if removes else part).to(x.dtype)

        return project


def _unit(vectors: Tensor) -> Tensor:
    """[..., D] -> the same directions with norm 1. ValueError for a direction of zeros, NaN or infinities."""
    import torch

    require_real(vectors)
    if not vectors.numel() or not vectors.dim():
        raise ValueError(f"a direction has shape {list(vectors.shape)}, expected a number for each element")
    exact = vectors.double()
    largest = exact.abs().amax(-1, keepdim=True)
    readable = holds_data(largest) and not torch.compiler.is_compiling()
    if readable and not (largest.isfinite() & (largest > 0)).all():
        raise ValueError("a direction is 0, or has elements that are not finite")
    # divided first: squares of small numbers would underflow
    return torch.nn.functional.normalize(exact / largest, dim=-1)


def _basis(vectors: Tensor) -> Tensor:
    """[k, D] -> [r, D], orthonormal, r the rank. ValueError for another shape."""
    import torch

    if vectors.dim() != 2:
        raise ValueError(f"the subspace has shape {list(vectors.shape)}, expected [vectors, elements]")
    _, sizes, basis = torch.linalg.svd(_unit(vectors), full_matrices=False)
    dtype = vectors.dtype if vectors.is_floating_point() else torch.float64
    tolerance = max(vectors.shape) * torch.finfo(dtype).eps  # as torch.linalg.matrix_rank
    return basis[sizes > sizes[0] * tolerance]

"""The action `capture`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import ByteLimit, Count, KeptSamples, OneOf, OrOne
from hookrun.engine.values.tensors import as_real, holds_data, on_device, widened

if TYPE_CHECKING:
    from torch import Tensor, dtype

Dimensions = Annotated[
    tuple[Annotated[int, Field(strict=True)], ...],
    BeforeValidator(lambda raw: (raw,) if isinstance(raw, int) else raw),
    OrOne(),
    Field(min_length=1),
]


class Reduction(OneOf):
    """One of: `mean` or `norm` over dimensions (by default all except the first), `topk`, `project`, `fingerprint`."""

    mean: Dimensions | None = None
    norm: Dimensions | None = None
    topk: Count | None = None
    project: Count | None = None
    fingerprint: Count | None = None


class Capture(Action):
    """Record the value at that moment, detached, with its containers.

    dtype:  dtype in which floating-point tensors are stored, for complex ones that of both parts; by default their own
    device: device on which they are kept in memory; by default their own. `cpu` waits for an accelerator;
            a run directory gets the rows of any device while the model goes on
    reduce: store less of each tensor. `{mean: [2, 3]}` and `{norm: [1]}` reduce these dimensions, by default all except
            the first; `{topk: 5}` stores the 5 largest elements of the last dimension, `values` in descending
            order, and where they are, `indices`;
            `{project: 64}` projects each row's elements to 64 numbers by a fixed random matrix (Gaussian, scaled to
            keep lengths on average: Johnson and Lindenstrauss), the same for every row, call and run of the hook. Of
            float8 tensors all this is computed and stored in float32.
            `{fingerprint: 64}` stores for each row 64 random projections, which have its L2 norm on average, the norm
            and the largest absolute value, in float32, of float64 in float64. The directions depend on the row's shape
            only: from the fingerprints of two runs the norm of the difference is known within 25 %, in 95 of 100 rows.
            Equal rows have equal fingerprints, in any batch. A complex number counts as two real ones; integers and
            booleans are stored as they are
    keep:   store some samples only, the same at all modules and in every epoch. `{every: 10}` is every tenth sample of
            the data set, `{reservoir: 100}` a hundred samples drawn at random
    max_bytes: limit of what the hook stores, over all its modules. Of the batch that would exceed it the first rows
            that fit are stored; later batches are not stored, with one warning. Several ranks divide it equally

    A None is an entry None in memory and has no row on disk; under `tokens` it has no entry. On disk a quantized tensor
    is dequantized. A part of a tensor is stored in memory of its own, not as a view. Inside `torch.vmap` the mapped
    dimension comes first in what is stored. While a model is traced (`torch.export`) nothing is stored. A value that
    contains an object of an unknown type is refused; use `target` to name the part to capture.
    """

    action_name = "capture"
    observes = True
    scope = "value"
    uses = ("keep",)
    dtype: Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = None
    device: Literal["cpu"] | None = None
    reduce: (
        Annotated[Reduction, BeforeValidator(lambda raw: {raw: None} if raw in ("mean", "norm") else raw)]
        | None
    ) = None
    keep: KeptSamples = None
    max_bytes: ByteLimit = None

    @property
    def by_row(self) -> bool:
        """A reduction is one of each row, unless it names dimensions."""
        reduction = self.reduce
        return reduction is not None and reduction.topk is None and not (reduction.mean or reduction.norm)

    @property
    def reduces(self) -> bool:
        """A reduction takes dimensions away."""
        return self.reduce is not None

    @property
    def not_in_graph(self) -> None:
        """A graph gives the tensors of a value to Python, where they are stored."""

    def build(self, site: HookSite) -> Edit:
        """A function that stores the value of each firing."""
        keep = site.keep()
        changes = self._changes(site)
        if self.keep is None and not changes:
            return keep
        from hookrun.engine.values.containers import tensors

        rows_of = None if self.keep is None else site.chosen(self.keep)

        def capture(value: Any) -> None:
            rows: Tensor | None = None
            if rows_of is not None:
                # every tensor has the rows of the batch: `rows_of` refuses any other shape
                rows = next(iter([rows_of(tensor.shape) for tensor in tensors(value)]), None)
            if rows is not None and not len(rows):
                return

            def changed(x: Tensor) -> Any:
                some = x.detach() if rows is None else x.detach()[on_device(rows, x.device)]
                if x.is_floating_point() or x.is_complex():
                    for change in changes:
                        some = change(some)
                return some

            keep(site.rebuild(value, changed), rows)

        return capture

    def _changes(self, site: HookSite) -> list[Callable[[Any], Any]]:
        """What is done with each tensor before it is stored: reduced, then converted."""
        changes: list[Callable[[Any], Any]] = []
        if self.reduce is not None:
            changes += [widened, _reducer(self.reduce, site)]
        # a run writes rows of any device, without waiting for it
        device = None if site.stores_rows else self.device
        if device is not None or self.dtype is not None:
            import torch

            dtype = None if self.dtype is None else getattr(torch, self.dtype)
            changes.append(partial(_converted, dtype, device))
        return changes


def _reducer(reduction: Reduction, site: HookSite) -> Callable[[Tensor], Any]:
    """A function that reduces a tensor."""
    import torch

    if reduction.topk is not None:
        return partial(_largest, reduction.topk)
    if reduction.project is not None:
        return _projection(reduction.project, site.seed)
    if reduction.fingerprint is not None:
        from hookrun.engine.values.fingerprints import fingerprints

        return partial(_fingerprints, fingerprints, reduction.fingerprint, site.hook_type.batch)
    dims = reduction.mean or reduction.norm
    over = torch.mean if "mean" in reduction.model_fields_set else torch.linalg.vector_norm

    def reduced(x: Tensor) -> Tensor:
        if not dims:
            return over(x, dim=tuple(range(1, x.dim()))) if x.dim() > 1 else x
        for dim in dims:
            if not -x.dim() <= dim < x.dim():
                raise ValueError(f"reduce: the shape {list(x.shape)} has no dimension {dim}")
        return over(x, dim=dims)

    return reduced


def _converted(to: dtype | None, device: str | None, x: Any) -> Any:
    """The tensor in a dtype and on a device; None: its own. Of integers and booleans the dtype stays."""
    if isinstance(x, Largest):
        return Largest(_converted(to, device, x.values), _converted(to, device, x.indices))
    if not (x.is_floating_point() or x.is_complex()):
        return x.to(device or x.device)
    real, restored = as_real(x)
    return restored(real.to(device=device or x.device, dtype=to or real.dtype))


class Largest(NamedTuple):
    """The largest elements of the last dimension in descending order, and their indices there: each [..., k]."""

    values: Tensor
    indices: Tensor


def _largest(count: int, x: Tensor) -> Any:
    """x [..., n] -> its `count` largest elements. ValueError if n < count."""
    if not x.dim():
        return x
    if x.shape[-1] < count:
        raise ValueError(
            f"reduce: topk: the last dimension of shape {list(x.shape)} has fewer than {count} elements"
        )
    return Largest(*x.topk(count))


def _fingerprints(
    fingerprints: Callable[[Tensor, int], Tensor], count: int, in_batches: bool, x: Tensor
) -> Tensor:
    """x [rows, ...] -> [rows, count + 2]. in_batches: one dimension is that of the batch; else it is one row"""
    return fingerprints(x if x.dim() > 1 or (in_batches and x.dim()) else x.reshape(1, -1), count)


def _projection(width: int, seed: int) -> Callable[[Tensor], Tensor]:
    """x [rows, ...] -> [rows, width], by a matrix that depends only on the hook and the number of elements."""
    import torch

    matrices: dict[Any, Tensor] = {}

    def project(x: Tensor) -> Tensor:
        flat = x.flatten(1) if x.dim() > 1 else x.reshape(1, -1)
        key = (flat.shape[1], flat.dtype, flat.device)
        matrix = matrices.get(key)
        if matrix is None:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(flat.shape[1], width, generator=generator) / math.sqrt(width)
            matrix = drawn.to(dtype=flat.dtype, device=flat.device)
            if holds_data(matrix):  # a matrix made while the model is traced cannot be used later
                matrices[key] = matrix
        return flat @ matrix

    return project

"""Fake tensors, with shapes and without data, in whose place no product of different dtypes is possible either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}
_GROUPED = _ATEN._grouped_mm.default


def _grouped(first: Any, second: Any, offs: Any = None, **others: Any) -> Any:
    """The product of groups of matrices, as experts compute it: torch's shape function takes 16 bits only.

    offs: [groups], where the rows or columns of each group end, in a matrix that has the groups one after the other
    """
    if first.dtype != second.dtype or first.shape[-1] != second.shape[-2]:
        raise RuntimeError(f"{first} and {second} cannot be multiplied")
    sizes = [first.shape[-2], second.shape[-1]]
    if first.dim() == second.dim():
        sizes.insert(0, len(first if offs is None else offs))
    return first.new_empty(sizes)


class FakeMode(FakeTensorMode):
    """torch's mode, with an error where a product of matrices has several dtypes: torch's own shape function has none.

    Without it a linear layer would take float64 samples in the trial run, and fail in the run itself.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Any:
        """Raises RuntimeError, as the operator with data does."""
        if func in _PRODUCTS:
            dtypes = dict.fromkeys(each.dtype for each in args if isinstance(each, Tensor))
            if len(dtypes) > 1:
                found = " and ".join(map(str, dtypes))
                raise RuntimeError(f"matrices that are multiplied must have the same dtype, but got {found}")
        products: Any = args
        if func is _GROUPED and products[0].dtype in (torch.float32, torch.float64):
            with self:
                return _grouped(*products, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

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
        return super().__torch_dispatch__(func, types, args, kwargs)

"""Plain values with tensors in them, sent from each rank of a run to all ranks."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.ranks.alone import Ranks
from hookrun.store.tensor_file import DTYPES, as_bytes, dtype_name
from hookrun.store.tree import flatten, unflatten

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


def gathered_trees(ranks: Ranks, tree: Any) -> list[Any]:
    """The trees of all ranks, in the order of the ranks, with tensors on the CPU; every rank must call it.

    Raises NotPlain for a value that a tree cannot hold.
    """
    values, tensors = flatten(tree)
    mine = {"values": values, "tensors": {name: _written(each) for name, each in tensors.items()}}
    found = ranks.gathered(mine)
    return [unflatten(each["values"], partial(_tensor, each["tensors"])) for each in found]


def _tensor(written: Mapping[str, tuple[str, list[int], str]], name: str) -> Tensor:
    return _read(*written[name])


def _written(tensor: Tensor) -> tuple[str, list[int], str]:
    """(dtype, shape, content as text)."""
    whole = tensor.detach().cpu().contiguous()
    content = as_bytes(whole.reshape(-1)).numpy().tobytes() if whole.numel() else b""
    return dtype_name(tensor.dtype), list(tensor.shape), b64encode(content).decode("ascii")


def _read(dtype: str, shape: list[int], content: str) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
    return torch.frombuffer(bytearray(b64decode(content)), dtype=_DTYPES[dtype]).reshape(shape)
